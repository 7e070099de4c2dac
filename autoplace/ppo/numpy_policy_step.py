"""The policy step in numpy."""

from __future__ import annotations

import itertools

import numpy as np
from torch import Tensor

from autoplace.ppo.network import OBSERVATION_CLAMP, ActorCritic, host_perceptron
from autoplace.ppo.rollout import Rollout


class NumpyPolicyStep:
    """What the eager ``PolicyStep`` does, as numpy operations on the same memory."""

    def __init__(self, network: ActorCritic) -> None:
        self._actor = host_perceptron(network.actor_layers)
        self._log_std = None if network.log_std is None else network.log_std.detach().numpy()
        self._normalizes = network.normalize_observations
        self._mean = network.observation_mean.numpy()
        self._inverse_std = network.observation_inverse_std.numpy()
        heads = network.spec.action_heads
        self._heads = [slice(*p) for p in itertools.pairwise(itertools.accumulate((0, *heads)))]
        # Arrays over the rows of each rollout, which is kept so that its number stays its own.
        self._rows: dict[int, tuple[Rollout, list[np.ndarray], list[np.ndarray]]] = {}

    def __call__(self, observations: Tensor, noise: Tensor, rollout: Rollout, t: int) -> Tensor:
        """Write row ``t`` of ``rollout`` and return its actions."""
        number = id(rollout)
        if number not in self._rows:
            rows = list(rollout.observations.numpy()), list(rollout.actions.numpy())
            self._rows[number] = rollout, *rows
        _, recorded, acted = self._rows[number]
        x, actions = recorded[t], acted[t]
        x[:] = observations.numpy()
        if self._normalizes:
            x = x - self._mean
            x *= self._inverse_std
            np.minimum(np.maximum(x, -OBSERVATION_CLAMP, out=x), OBSERVATION_CLAMP, out=x)
        outputs = self._actor.forward(x)
        if self._log_std is not None:
            np.add(outputs.T, noise.numpy() * np.exp(self._log_std), out=actions)
        elif self._heads:
            outputs += noise.numpy().T
            for column, head in enumerate(self._heads):
                actions[:, column] = outputs[head].argmax(0)
        else:
            outputs += noise.numpy().T
            outputs.argmax(0, out=actions)
        return rollout.action_rows[t]
