"""The weights of several versions of a network."""

from __future__ import annotations

import torch
from torch import Tensor

from autoplace.ppo.network import ActorCritic


class Versions:
    """The weights that may have sampled what is still to be learned from."""

    def __init__(self, network: ActorCritic, max_policy_lag: int) -> None:
        """Make room for the buffers of as many networks like this one."""
        # Version v is in place v modulo their number, until it can have acted no longer.
        self._kept = [
            network.over(torch.empty_like(network.flat)) for _ in range(max_policy_lag + 1)
        ]

    def keep(self, version: int, flat: Tensor) -> None:
        """Keep the buffer of a network that ``version`` updates have made."""
        self[version].flat.copy_(flat)

    def __getitem__(self, version: int) -> ActorCritic:
        return self._kept[version % len(self._kept)]
