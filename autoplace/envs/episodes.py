"""Returns and lengths of episodes, as raw rewards sum up."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autoplace.clock import now
from autoplace.envs.vector import Step

WINDOW = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """An episode that ended.

    Attributes:
        env: index of its environment.
        episode_return: undiscounted sum of its raw rewards.
        length: its steps.
        env_steps: env steps that had been sampled by its end, those before the tracker included.
    """

    env: int
    episode_return: float
    length: int
    env_steps: int


class EpisodeTracker:
    """Follows every environment's running episode and remembers the last 100 that ended.

    Attributes:
        num_episodes: that ended.
        num_skipped: rows that were no transitions, see :attr:`Step.valid`.
        spent_s: seconds that counting has taken so far.
    """

    def __init__(
        self, num_envs: int, recent: Iterable[tuple[float, int]] = (), *, env_steps: int = 0
    ) -> None:
        """Go on after ``env_steps``, of which the ``recent`` episodes were the last to end."""
        self._env_steps_before = env_steps
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._recent: deque[tuple[float, int]] = deque(recent, maxlen=WINDOW)
        self.num_episodes = 0
        self.num_skipped = 0
        self.spent_s = 0.0
        self._num_rows = 0
        self._ended: list[Episode] = []

    def add(self, step: Step) -> None:
        """Account for one vector step."""
        outcomes = np.stack((step.rewards, step.terminated, step.truncated))[None]
        self.add_rollout(outcomes, None if step.valid is None else np.flatnonzero(step.valid))

    def add_rollout(self, outcomes: np.ndarray, valid_index: np.ndarray | None = None) -> None:
        """Account for a rollout at once.

        Args:
            outcomes: ``[T, 3, N]``: rewards, terminated and truncated.
            valid_index: ``[V]``, the rows ``t N + env`` that are transitions; ``None`` where all
                are.
        """
        start_s = now()
        steps, _, num_envs = outcomes.shape
        over = np.logical_or(outcomes[:, 1], outcomes[:, 2])
        rewards = outcomes[:, 0].T.astype(np.float64)  # [N, T]
        valid = np.ones((steps, num_envs), np.bool_)
        if valid_index is not None:
            valid[:] = False
            valid.flat[valid_index] = True
            rewards[~valid.T] = 0.0
        lengths = np.add.accumulate(valid, 0, dtype=np.int64) + self._lengths  # had none ended
        counted = np.add.accumulate(np.add.reduce(valid, 1, dtype=np.int64))
        counted += self._num_rows - self.num_skipped
        ends, envs = np.nonzero(over)
        # One row after the other, whatever the shape: the same bits as step by step.
        rewards[:, 0] += self._returns
        returns = np.zeros(len(ends))
        begun = [0] * num_envs
        for index, (end, env) in enumerate(zip(ends.tolist(), envs.tolist(), strict=True)):
            returns[index] = np.add.accumulate(rewards[env, begun[env] : end + 1])[-1]
            begun[env] = end + 1
        for env in np.unique(envs).tolist():
            rewards[env, : begun[env]] = 0.0
        self._returns = np.add.accumulate(rewards, 1)[:, -1]
        self._end(ends, envs, returns, lengths, self._env_steps_before + counted, valid)
        self._num_rows += steps * num_envs
        self.num_skipped = self._num_rows - int(counted[-1])
        self.spent_s += now() - start_s

    def _end(
        self,
        ends: np.ndarray,
        envs: np.ndarray,
        returns: np.ndarray,
        lengths: np.ndarray,
        counted: np.ndarray,
        valid: np.ndarray,
    ) -> None:
        """End episodes by their last rows, in order; those that a row without a step ends are lost.

        Args:
            ends: ``[E]``, the last row of each.
            envs: ``[E]``, whose it is.
            returns: ``[E]``.
            lengths: ``[T, N]``, as if none had ended.
            counted: ``[T]``, env steps sampled until the end of each row.
            valid: ``[T, N]``.
        """
        before = np.zeros_like(self._lengths)  # when the episode in progress began
        for end, env, episode_return in zip(
            ends.tolist(), envs.tolist(), returns.tolist(), strict=True
        ):
            length = int(lengths[end, env] - before[env])
            before[env] = lengths[end, env]
            if valid[end, env]:
                episode = Episode(
                    env=env,
                    episode_return=episode_return,
                    length=length,
                    env_steps=int(counted[end]),
                )
                self._ended.append(episode)
                self._recent.append((episode_return, length))
                self.num_episodes += 1
        self._lengths = lengths[-1] - before

    def take_ended(self, env_steps: int) -> tuple[Episode, ...]:
        """Episodes that ended within the first ``env_steps``, but for those taken before."""
        taken = tuple(e for e in self._ended if e.env_steps <= env_steps)
        self._ended = [e for e in self._ended if e.env_steps > env_steps]
        return taken

    @property
    def recent(self) -> list[tuple[float, int]]:
        """(return, length) of the last episodes that ended, at most 100."""
        return list(self._recent)

    @property
    def mean_return(self) -> float | None:
        """Over the last 100 episodes; ``None`` while no episode has ended."""
        return self._mean(0)

    @property
    def mean_length(self) -> float | None:
        """Over the last 100 episodes; ``None`` while no episode has ended."""
        return self._mean(1)

    def _mean(self, column: int) -> float | None:
        if not self._recent:
            return None
        return math.fsum([episode[column] for episode in self._recent]) / len(self._recent)

    @property
    def longest_running(self) -> int:
        """Steps that the longest episode in progress has taken."""
        return int(self._lengths.max())
