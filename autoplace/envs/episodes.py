"""Returns and lengths of episodes, as raw rewards sum up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from autoplace.envs.vector import Step

WINDOW = 100


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

    def add(self, step: Step) -> None:
        """Account for one vector step."""
        if step.valid is None:
            self._returns += step.rewards
            self._lengths += 1
        else:
            self._returns += np.where(step.valid, step.rewards, 0.0)
            self._lengths += step.valid
            self.num_skipped += len(step.valid) - int(np.count_nonzero(step.valid))
        for index in step.ended:
            self._recent.append((float(self._returns[index]), int(self._lengths[index])))
            self._returns[index] = 0.0
            self._lengths[index] = 0
            self.num_episodes += 1

    @property
    def recent(self) -> list[tuple[float, int]]:
        """(return, length) of the last episodes that ended, at most 100."""
        return list(self._recent)

    @property
    def mean_return(self) -> float | None:
        """Over the last 100 episodes; ``None`` while no episode has ended."""
        if not self._recent:
            return None
        return float(np.mean([episode_return for episode_return, _ in self._recent]))

    @property
    def mean_length(self) -> float | None:
        """Over the last 100 episodes; ``None`` while no episode has ended."""
        return float(np.mean([length for _, length in self._recent])) if self._recent else None

    @property
    def longest_running(self) -> int:
        """Steps that the longest episode in progress has taken."""
        return int(self._lengths.max())
