"""One policy step: the operation that runs once per vector step."""

from __future__ import annotations

import torch
from torch import Tensor

from autoplace.ppo.distribution import by_head
from autoplace.ppo.network import ActorCritic, forward_layers
from autoplace.ppo.rollout import Rollout


class PolicyStep:
    """Sample actions for ``N`` observations and record both in a rollout.

    Only the actor runs: values and log-probabilities of the whole rollout are computed in one pass
    when it is complete (:func:`autoplace.ppo.batch.make_batch`). Works on whatever device the
    network, the noise and the rollout share, and never waits for it.
    """

    def __init__(self, network: ActorCritic) -> None:
        self._network = network
        self._continuous = network.spec.continuous
        self._heads = network.spec.action_heads
        self._plain = network.spec.is_plain

    @torch.inference_mode()
    def __call__(self, observations: Tensor, noise: Tensor, rollout: Rollout, t: int) -> Tensor:
        """Write row ``t`` of ``rollout`` and return its actions.

        Args:
            observations: raw, ``[N, D]``, of the network's type of rows.
            noise: ``[N, A]`` from :func:`autoplace.ppo.distribution.draw_noise`.
            rollout: where observations and actions are recorded.
            t: the vector step.

        Returns:
            The rollout's own row of actions: ``[N]`` or ``[N, H]`` int64, or ``[N, A]`` float32.
        """
        network = self._network
        actions = rollout.action_rows[t]
        recorded = rollout.observation_rows[t].copy_(observations)
        if self._plain:
            outputs = forward_layers(network.actor_layers, network.normalize(recorded))
        else:
            outputs = network.policy(network.normalize(recorded)).clone()
        if self._continuous:
            assert network.log_std is not None
            return torch.addcmul(outputs, noise, network.log_std.exp(), out=actions)
        noisy = outputs.add_(noise)
        if self._heads:
            noisy = by_head(noisy, self._heads)
        return torch.argmax(noisy, -1, out=actions)
