"""Returns and lengths of episodes, as raw rewards sum up."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autoplace.envs.vector import Step

WINDOW = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """An episode that ended.

    Attributes:
        env: index of its environment.
        episode_return: undiscounted sum of its raw rewards.
        length: its steps.
        env_steps: env steps that had been sampled by its end, of those that the tracker saw.
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
    """

    def __init__(self, num_envs: int, recent: Iterable[tuple[float, int]] = ()) -> None:
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._recent: deque[tuple[float, int]] = deque(recent, maxlen=WINDOW)
        self.num_episodes = 0
        self.num_skipped = 0
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
        steps, _, num_envs = outcomes.shape
        rewards, over = outcomes[:, 0], np.logical_or(outcomes[:, 1], outcomes[:, 2])
        valid: np.ndarray | None = None
        if valid_index is not None:
            valid = np.zeros((steps, num_envs), np.bool_)
            valid.flat[valid_index] = True
            rewards = np.where(valid, rewards, 0.0)
        start = 0
        for t in np.flatnonzero(over.any(1)).tolist():
            rows = slice(start, t + 1)
            self._run_on(rewards[rows], None if valid is None else valid[rows])
            if valid is None:
                self._end(np.flatnonzero(over[t]))
            else:
                self._end(np.flatnonzero(over[t] & valid[t]))
                self._lose(np.flatnonzero(over[t] & ~valid[t]))
            start = t + 1
        self._run_on(rewards[start:], None if valid is None else valid[start:])

    def _run_on(self, rewards: np.ndarray, valid: np.ndarray | None) -> None:
        """Rows ``[K, N]`` in which no episode ends, but in the last."""
        # One row after the other, whatever the shape: the same bits as step by step.
        self._returns = np.add.accumulate(np.vstack((self._returns, rewards)))[-1]
        self._lengths += len(rewards) if valid is None else np.add.reduce(valid, 0)
        self._num_rows += rewards.size
        if valid is not None:
            self.num_skipped += rewards.size - int(np.count_nonzero(valid))

    def _end(self, ended: Sequence[int] | np.ndarray) -> None:
        """End the episodes of some environments with the last row."""
        returns, lengths = self._returns, self._lengths
        for index in ended:
            episode = Episode(
                env=int(index),
                episode_return=float(returns[index]),
                length=int(lengths[index]),
                env_steps=self._num_rows - self.num_skipped,
            )
            self._ended.append(episode)
            self._recent.append((episode.episode_return, episode.length))
            returns[index] = 0.0
            lengths[index] = 0
            self.num_episodes += 1

    def _lose(self, envs: np.ndarray) -> None:
        """Forget the episodes in progress of some environments."""
        self._returns[envs], self._lengths[envs] = 0.0, 0

    def take_ended(self, env_steps: int) -> tuple[Episode, ...]:
        """Episodes that ended within the first ``env_steps`` seen, but for those taken before."""
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
