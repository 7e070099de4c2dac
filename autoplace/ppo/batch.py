"""From a recorded rollout to the rows that gradient steps read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autoplace.ppo.distribution import log_prob
from autoplace.ppo.gae import advantages, bootstrap_values
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.reward_normalizer import RewardNormalizer
from autoplace.ppo.rollout import Rollout
from autoplace.workload import Hyperparameters, NetworkSpec

_PASS_ROWS = 65536  # bounds the activations of a pass over the whole rollout


@dataclass(frozen=True, slots=True)
class Batch:
    """A rollout as one matrix, a row per env step, so that a minibatch is one gather.

    Columns: ``D`` normalised observations, the action (1 column, or ``A``), the log-probability
    under the weights that acted, the advantage, the return. Actions of a categorical policy are
    whole numbers, exact in float32.

    Attributes:
        rows: ``[T N, W]`` float32, time-major.
        spec: of the network, which tells the widths.
    """

    rows: Tensor
    spec: NetworkSpec

    @property
    def num_rows(self) -> int:
        """Env steps in the batch."""
        return int(self.rows.shape[0])

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(observations, actions, log-probabilities, advantages, returns) of gathered rows."""
        spec = self.spec
        width = spec.action_size if spec.continuous else 1
        observations, actions, rest = torch.split(rows, [spec.observation_size, width, 3], 1)
        log_probs, advantage, returns = rest.unbind(1)
        if not spec.continuous:
            actions = actions.squeeze(1).long()
        return observations, actions, log_probs, advantage, returns


@torch.no_grad()
def make_batch(
    network: ActorCritic,
    rollout: Rollout,
    hyperparameters: Hyperparameters,
    reward_normalizer: RewardNormalizer | None = None,
) -> Batch:
    """Log-probabilities, values, advantages and returns of a complete rollout.

    This is the trainer's ``gae`` stage. ``network`` must hold the weights that acted.
    """
    steps, num_envs, spec = rollout.rollout_steps, rollout.num_envs, rollout.spec
    observations = network.normalize(rollout.observations.view(-1, spec.observation_size))
    values = _in_passes(network.value, observations).view(steps + 1, num_envs)
    final_values = network.value(network.normalize(rollout.final_observations))

    acted_on = observations[: steps * num_envs]
    actions = rollout.actions.view(steps * num_envs, -1)
    outputs = _in_passes(network.policy, acted_on)
    log_probs = log_prob(outputs, network.log_std, actions if spec.continuous else actions[:, 0])

    rewards, terminated, truncated = rollout.outcomes.unbind(1)
    ended = torch.maximum(terminated, truncated)
    if reward_normalizer is not None:
        rewards = reward_normalizer.normalize(rewards, ended)
    led_to = bootstrap_values(values, terminated, rollout.final_index, final_values)
    advantage = advantages(
        rewards,
        values[:-1],
        led_to,
        ended,
        gamma=hyperparameters.gamma,
        gae_lambda=hyperparameters.gae_lambda,
    )
    returns = advantage + values[:-1]
    columns = (acted_on, actions, *(x.reshape(-1, 1) for x in (log_probs, advantage, returns)))
    return Batch(torch.cat([column.float() for column in columns], 1), spec)


def _in_passes(function: object, rows: Tensor) -> Tensor:
    assert callable(function)
    if rows.shape[0] <= _PASS_ROWS:
        return function(rows)  # type: ignore[no-any-return]
    return torch.cat([function(part) for part in torch.split(rows, _PASS_ROWS)])
