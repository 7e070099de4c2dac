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
        recorded = rollout.observation_rows[t].copy_(observations)
        return choose_actions(self._network, recorded, noise, rollout.action_rows[t])


def choose_actions(
    network: ActorCritic, observations: Tensor, noise: Tensor, out: Tensor | None = None
) -> Tensor:
    """Sampled actions for raw observations ``[N, D]``, written to ``out`` where that is given."""
    spec = network.spec
    if spec.is_plain:
        outputs = forward_layers(network.actor_layers, network.normalize(observations))
    else:
        outputs = network.policy(network.normalize(observations)).clone()
    if network.log_std is not None:
        return torch.addcmul(outputs, noise, network.log_std.exp(), out=out)
    noisy = outputs.add_(noise)
    if spec.action_heads:
        noisy = by_head(noisy, spec.action_heads)
    return torch.argmax(noisy, -1, out=out)
