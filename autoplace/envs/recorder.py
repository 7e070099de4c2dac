"""Writes what the environments answered into a rollout's arrays on the host."""

from __future__ import annotations

import numpy as np

from autoplace.envs.vector import Step


class OutcomeRecorder:
    """Rewards, flags and final observations of one rollout, on the host.

    Attributes:
        valid_index: ``[V]`` int64, the rows ``t N + env`` that are transitions in the rollout whose
            final observations were taken last; ``None`` where all are.
    """

    def __init__(self, outcomes: np.ndarray) -> None:
        """Write into ``outcomes``, ``[T, 3, N]`` on the host."""
        self._rows = [tuple(row) for row in outcomes]
        self._num_envs = outcomes.shape[2]
        self._index: list[int] = []
        self._finals: list[np.ndarray] = []
        self._invalid: list[int] = []
        self.valid_index: np.ndarray | None = None
        self._num_rows = outcomes.shape[0] * self._num_envs

    def record(self, t: int, step: Step, first: int = 0) -> None:
        """Write row ``t``, or its columns from ``first`` on where only some environments stepped.

        Within a row, groups of environments are recorded in order.
        """
        rewards, terminated, truncated = self._rows[t]
        columns = slice(first, first + len(step.rewards))
        rewards[columns] = step.rewards
        terminated[columns] = step.terminated
        truncated[columns] = step.truncated
        start = t * self._num_envs + first
        for position, env in enumerate(step.ended):
            # A terminal state is worth 0; only a truncated episode is bootstrapped from its end.
            if not step.terminated[env]:
                self._index.append(start + env)
                self._finals.append(step.final_observations[position])
        if step.valid is not None:
            self._invalid.extend((start + np.flatnonzero(~step.valid)).tolist())

    def take_finals(self, observation_size: int) -> tuple[np.ndarray, np.ndarray]:
        """(index ``[F]``, observations ``[F, D]``) of truncated episodes; starts a new rollout.

        Sets :attr:`valid_index` too.
        """
        self.valid_index = self._take_valid()
        index = np.array(self._index, np.int64)
        rows = np.stack(self._finals) if self._finals else np.zeros((0, observation_size))
        self._index, self._finals = [], []
        if rows.dtype != np.uint8:  # rows of bytes stay what they are
            rows = rows.astype(np.float32, copy=False)
        return index, rows

    def _take_valid(self) -> np.ndarray | None:
        if not self._invalid:
            return None
        valid = np.ones(self._num_rows, np.bool_)
        valid[self._invalid] = False
        self._invalid = []
        return np.flatnonzero(valid)
