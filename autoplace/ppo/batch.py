"""From a recorded rollout to the rows that gradient steps read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autoplace.ppo.distribution import log_prob
from autoplace.ppo.gae import advantages, bootstrap_values
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.reward_normalizer import RewardNormalizer
from autoplace.ppo.rollout import Rollout
from autoplace.workload import PASS_ROWS, Hyperparameters, NetworkSpec


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
    acted: Sequence[ActorCritic] = (),
) -> Batch:
    """Log-probabilities, values, advantages and returns of a complete rollout.

    This is the trainer's ``gae`` stage.

    Args:
        network: that is to learn.
        rollout: what was recorded.
        hyperparameters: discounts.
        reward_normalizer: scales the rewards, where they are scaled.
        acted: where it was not ``network`` that acted, those that did, each in an equal share of
            the environments, in their order. Log-probabilities and values are theirs; the rows hold
            the observations as ``network`` normalises them.
    """
    spec = rollout.spec
    seen = _evaluate(acted or (network,), rollout)
    values, actions = seen.values, rollout.actions.view(rollout.num_rows, -1)
    rewards, terminated, truncated = rollout.outcomes.unbind(1)
    ended = torch.maximum(terminated, truncated)
    if hyperparameters.clip_rewards:
        rewards = rewards.sign()
    if reward_normalizer is not None:
        rewards = reward_normalizer.normalize(rewards, ended, rollout.valid_index)
    led_to = bootstrap_values(values, terminated, rollout.final_index, seen.final_values)
    advantage = advantages(
        rewards,
        values[:-1],
        led_to,
        ended,
        gamma=hyperparameters.gamma,
        gae_lambda=hyperparameters.gae_lambda,
        transitions=_transitions(rollout),
    )
    returns = advantage + values[:-1]
    observations = seen.observations
    if observations is None or (acted and network.normalize_observations):
        observations = network.normalize(torch.flatten(rollout.observations[:-1], 0, 1))
    images = observations if spec.images else None
    columns = [actions, *(x.reshape(-1, 1) for x in (seen.log_probs, advantage, returns))]
    if images is None:
        columns.insert(0, observations)
    rows = torch.cat([column.float() for column in columns], 1)
    # What is no transition has touched no other row's advantage; it only has to be left out.
    if rollout.valid_index is not None:
        rows = rows.index_select(0, rollout.valid_index)
        images = images if images is None else images.index_select(0, rollout.valid_index)
    return Batch(rows, spec, images)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A rollout as the weights that acted see it.

    Attributes:
        values: ``[T + 1, N]``.
        log_probs: ``[T, N]``, or ``[T N]``.
        final_values: ``[F]``.
        observations: ``[T N, D]``, normalised; ``None`` where several networks acted.
    """

    values: Tensor
    log_probs: Tensor
    final_values: Tensor
    observations: Tensor | None


def _evaluate(acted: Sequence[ActorCritic], rollout: Rollout) -> _Seen:
    """Evaluate every share of the environments by the network that acted in it."""
    if all(network is acted[0] for network in acted):
        return _evaluate_all(acted[0], rollout.observations, rollout.actions, rollout)
    width = rollout.num_envs // len(acted)
    final_env = rollout.final_index % rollout.num_envs
    observations, actions = rollout.observations, rollout.actions
    values = observations.new_empty(observations.shape[:2], dtype=torch.float32)
    log_probs = values.new_empty(actions.shape[:2])
    final_values = values.new_zeros(final_env.shape)
    for network in dict.fromkeys(acted):
        ours = [by is network for by in acted for _ in range(width)]
        is_ours = torch.tensor(ours, device=values.device)
        columns = is_ours.nonzero().squeeze(1)
        part = _evaluate_all(
            network,
            observations.index_select(1, columns),
            actions.index_select(1, columns),
            rollout,
        )
        values.index_copy_(1, columns, part.values)
        log_probs.index_copy_(1, columns, part.log_probs.view(len(actions), -1))
        final_values = torch.where(is_ours[final_env], part.final_values, final_values)
    return _Seen(values, log_probs, final_values, None)


def _evaluate_all(
    network: ActorCritic, observations: Tensor, actions: Tensor, rollout: Rollout
) -> _Seen:
    """Evaluate ``observations [T + 1, n, D]``, ``actions [T, n]`` and all final observations."""
    spec, num_rows = rollout.spec, actions.shape[0] * actions.shape[1]
    normalized = network.normalize(observations.view(-1, spec.observation_size))
    acted_on = normalized[:num_rows]
    if spec.is_plain:
        values = _in_passes(network.value, normalized)
        outputs = _in_passes(network.policy, acted_on)
    else:
        outputs, values = _both_in_passes(network, normalized)
        outputs = outputs[:num_rows]
    finals = rollout.final_observations.to(observations.dtype)
    final_values = network.value(network.normalize(finals))
    chosen = actions.view(num_rows, -1)
    if not (spec.continuous or spec.action_heads):
        chosen = chosen[:, 0]
    log_probs = log_prob(outputs, network.log_std, chosen, spec.action_heads)
    return _Seen(values.view(observations.shape[:2]), log_probs, final_values, acted_on)


def _transitions(rollout: Rollout) -> Tensor | None:
    """``[T, N]``, 1 in rows that are transitions and 0 elsewhere; ``None`` where all are."""
    if rollout.valid_index is None:
        return None
    rows = torch.zeros_like(rollout.rewards, memory_format=torch.contiguous_format).view(-1)
    ones = torch.ones_like(rollout.valid_index, dtype=rows.dtype)
    return rows.index_copy_(0, rollout.valid_index, ones).view_as(rollout.rewards)


def _in_passes(function: object, rows: Tensor) -> Tensor:
    assert callable(function)
    if rows.shape[0] <= PASS_ROWS:
        return function(rows)  # type: ignore[no-any-return]
    return torch.cat([function(part) for part in torch.split(rows, PASS_ROWS)])


def _both_in_passes(network: ActorCritic, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(policy outputs, values) of rows, what they share computed once."""
    pass_rows = network.spec.pass_rows(rows.device.type)
    parts = [network.both(part) for part in torch.split(rows, pass_rows)]
    return torch.cat([outputs for outputs, _ in parts]), torch.cat([v for _, v in parts])
