"""Adam of one flat parameter: torch's own, and one for runs that need no other part of torch.optim.

Making one of torch's optimisers imports its compiler, which takes a second and 100 MB.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Protocol

import torch
from torch import Tensor

ADAM_EPS = 1e-5  # as in the original PPO code; Adam's default of 1e-8 learns less stably
BETA_1, BETA_2 = 0.9, 0.999  # torch's defaults


class Adam(Protocol):
    """What an updater uses of its optimiser, by torch's names."""

    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]

    def step(self) -> Any:  # noqa: ANN401 - torch's may return a loss
        """Move the parameter by its gradient."""
        ...


class HostAdam:
    """Adam in plain operations on the CPU (Kingma and Ba 2015, algorithm 1)."""

    def __init__(self, parameter: Tensor, learning_rate: float) -> None:
        """Optimise ``parameter``; its count of steps and moments are given by ``state``."""
        self.param_groups = [{"lr": learning_rate, "fused": False}]
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        self._parameter = parameter

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameter by its gradient."""
        parameter, gradient = self._parameter, self._parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        state["step"] += 1
        steps = state["step"].item()
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.lerp_(gradient, 1.0 - BETA_1)
        second.mul_(BETA_2).addcmul_(gradient, gradient, value=1.0 - BETA_2)
        spread = second.sqrt().div_((1.0 - BETA_2**steps) ** 0.5).add_(ADAM_EPS)
        rate = self.param_groups[0]["lr"] / (1.0 - BETA_1**steps)
        parameter.addcdiv_(first, spread, value=-rate)


def make_adam(parameter: torch.nn.Parameter, learning_rate: float) -> Adam:
    """Torch's Adam, in one kernel where torch has that for the device, else its plain form."""
    try:
        return torch.optim.Adam([parameter], lr=learning_rate, eps=ADAM_EPS, fused=True)
    except RuntimeError:  # torch names the devices that it has a fused kernel for
        return torch.optim.Adam([parameter], lr=learning_rate, eps=ADAM_EPS)
