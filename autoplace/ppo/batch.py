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

# What bounds the activations of a pass over the whole rollout: its rows, and with an encoder of
# images or a network of the user's own the numbers that its layers put out.
_PASS_ROWS = 65536
_PASS_NUMBERS = 1 << 24


@dataclass(frozen=True, slots=True)
class Batch:
    """A rollout as one matrix, a row per env step, so that a minibatch is one gather.

    Columns: ``D`` normalised observations, the action (1 column, a column per head, or ``A``), the
    log-probability under the weights that acted, the advantage, the return. Actions of a
    categorical policy are whole numbers, exact in float32. With images the observations stay where
    they are, a byte per number, and a minibatch is two gathers.

    Attributes:
        rows: ``[T N, W]`` float32, time-major; ``[V, W]`` where only some are transitions.
        spec: of the network, which tells the widths.
        images: rows of bytes ``[T N, D]`` (uint8), where observations hold images.
    """

    rows: Tensor
    spec: NetworkSpec
    images: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Env steps in the batch."""
        return int(self.rows.shape[0])

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(observations, actions, log-probabilities, advantages, returns) of gathered rows."""
        spec = self.spec
        width = 0 if self.images is not None else spec.observation_size
        observations, actions, rest = torch.split(rows, [width, spec.action_columns, 3], 1)
        log_probs, advantage, returns = rest.unbind(1)
        if not spec.continuous:
            actions = (actions if spec.action_heads else actions.squeeze(1)).long()
        return observations, actions, log_probs, advantage, returns

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What :meth:`split` gives, of the rows ``index`` (int64 ``[B]``)."""
        observations, *rest = self.split(self.rows.index_select(0, index))
        if self.images is not None:
            observations = self.images.index_select(0, index)
        actions, log_probs, advantage, returns = rest
        return observations, actions, log_probs, advantage, returns


@torch.no_grad()
def make_batch(
    network: ActorCritic,
    rollout: Rollout,
    hyperparameters: Hyperparameters,
    reward_normalizer: RewardNormalizer | None = None,
    *,
    learning: ActorCritic | None = None,
) -> Batch:
    """Log-probabilities, values, advantages and returns of a complete rollout.

    This is the trainer's ``gae`` stage.

    Args:
        network: holds the weights and statistics that acted.
        rollout: what they recorded.
        hyperparameters: discounts.
        reward_normalizer: scales the rewards, where they are scaled.
        learning: the network that is to learn, where its weights are not those that acted. The
            rows then hold the observations as this one normalises them.
    """
    steps, num_envs, spec = rollout.rollout_steps, rollout.num_envs, rollout.spec
    observations = network.normalize(rollout.observations.view(-1, spec.observation_size))
    acted_on = observations[: steps * num_envs]
    if spec.is_plain:
        values = _in_passes(network.value, observations)
        outputs = _in_passes(network.policy, acted_on)
    else:
        outputs, values = _both_in_passes(network, observations)
        outputs = outputs[: steps * num_envs]
    values = values.view(steps + 1, num_envs)
    finals = rollout.final_observations.to(rollout.observations.dtype)
    final_values = network.value(network.normalize(finals))

    actions = rollout.actions.view(steps * num_envs, -1)
    chosen = actions if spec.continuous or spec.action_heads else actions[:, 0]
    log_probs = log_prob(outputs, network.log_std, chosen, spec.action_heads)

    rewards, terminated, truncated = rollout.outcomes.unbind(1)
    ended = torch.maximum(terminated, truncated)
    if hyperparameters.clip_rewards:
        rewards = rewards.sign()
    if reward_normalizer is not None:
        rewards = reward_normalizer.normalize(rewards, ended, rollout.valid_index)
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
    if learning is not None and network.normalize_observations:
        acted_on = learning.normalize(torch.flatten(rollout.observations[:-1], 0, 1))
    images = acted_on if spec.images else None
    columns = [actions, *(x.reshape(-1, 1) for x in (log_probs, advantage, returns))]
    if images is None:
        columns.insert(0, acted_on)
    rows = torch.cat([column.float() for column in columns], 1)
    # A row that is no transition follows the end of an episode, where traces are cut, so it has
    # touched no other row's advantage; it only has to be left out.
    if rollout.valid_index is not None:
        rows = rows.index_select(0, rollout.valid_index)
        images = images if images is None else images.index_select(0, rollout.valid_index)
    return Batch(rows, spec, images)


def _in_passes(function: object, rows: Tensor) -> Tensor:
    assert callable(function)
    if rows.shape[0] <= _PASS_ROWS:
        return function(rows)  # type: ignore[no-any-return]
    return torch.cat([function(part) for part in torch.split(rows, _PASS_ROWS)])


def _both_in_passes(network: ActorCritic, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(policy outputs, values) of rows, what they share computed once."""
    pass_rows = max(1, min(_PASS_ROWS, _PASS_NUMBERS // network.spec.activation_size))
    parts = [network.both(part) for part in torch.split(rows, pass_rows)]
    return torch.cat([outputs for outputs, _ in parts]), torch.cat([v for _, v in parts])
