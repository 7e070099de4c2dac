"""The policy step in numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from autoplace.ppo.network import ActorCritic
from autoplace.ppo.numpy_policy import NumpyPolicy, PolicyLayout, View
from autoplace.ppo.rollout import Rollout


class NumpyPolicyStep:
    """What the eager ``PolicyStep`` does, as numpy operations on the same memory."""

    def __init__(self, network: ActorCritic) -> None:
        self._policy = NumpyPolicy(network.flat.detach().numpy(), policy_layout(network))
        # Arrays over the rows of each rollout, which is kept so that its number stays its own.
        self._rows: dict[int, tuple[Rollout, list[np.ndarray], list[np.ndarray]]] = {}

    def __call__(self, observations: Tensor, noise: Tensor, rollout: Rollout, t: int) -> Tensor:
        """Write row ``t`` of ``rollout`` and return its actions."""
        recorded, acted = self._arrays(rollout)
        x = recorded[t]
        x[:] = observations.numpy()
        self._policy.act(x, noise.numpy(), acted[t])
        return rollout.action_rows[t]

    def over(self, observations: Tensor, noise: Tensor, rollout: Rollout) -> Callable[[int], None]:
        """The step of a whole rollout by row, of observations that lie in one place."""
        recorded, acted = self._arrays(rollout)
        seen, noise_rows, policy = observations.numpy(), list(noise.numpy()), self._policy

        def act(t: int) -> None:
            x = recorded[t]
            x[:] = seen
            policy.act(x, noise_rows[t], acted[t])

        return act

    def _arrays(self, rollout: Rollout) -> tuple[list[np.ndarray], list[np.ndarray]]:
        number = id(rollout)
        if number not in self._rows:
            rows = list(rollout.observations.numpy()), list(rollout.actions.numpy())
            self._rows[number] = rollout, *rows
        _, recorded, acted = self._rows[number]
        return recorded, acted


def policy_layout(network: ActorCritic) -> PolicyLayout:
    """Where the policy of a network of perceptrons is in its buffer."""
    start = network.flat.storage_offset()

    def view(tensor: Tensor) -> View:
        return View(int(tensor.storage_offset() - start), tuple(tensor.shape))

    return PolicyLayout(
        layers=tuple((view(weight), view(bias)) for weight, bias in network.actor_layers),
        log_std=None if network.log_std is None else view(network.log_std),
        mean=view(network.observation_mean),
        inverse_std=view(network.observation_inverse_std),
        normalizes=network.normalize_observations,
        heads=network.spec.action_heads,
    )
