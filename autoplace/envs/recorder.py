"""Writes what the environments answered into a rollout's host tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from autoplace.envs.episodes import EpisodeTracker
from autoplace.envs.vector import Step


class OutcomeRecorder:
    """Rewards, flags and final observations of one rollout, on the host."""

    def __init__(self, outcomes: Tensor, episodes: EpisodeTracker) -> None:
        """Write into ``outcomes``, ``[T, 3, N]`` on the host."""
        self._rows = [tuple(row) for row in outcomes.numpy()]
        self._num_envs = outcomes.shape[2]
        self._episodes = episodes
        self._index: list[int] = []
        self._finals: list[np.ndarray] = []

    def record(self, t: int, step: Step) -> None:
        """Write row ``t``."""
        rewards, terminated, truncated = self._rows[t]
        rewards[:] = step.rewards
        terminated[:] = step.terminated
        truncated[:] = step.truncated
        for position, env in enumerate(step.ended):
            # A terminal state is worth 0; only a truncated episode is bootstrapped from its end.
            if not step.terminated[env]:
                self._index.append(t * self._num_envs + env)
                self._finals.append(step.final_observations[position])
        self._episodes.add(step)

    def take_finals(self, observation_size: int) -> tuple[Tensor, Tensor]:
        """(index ``[F]``, observations ``[F, D]``) of truncated episodes; starts a new rollout."""
        index = torch.tensor(self._index, dtype=torch.int64)
        rows = np.stack(self._finals) if self._finals else np.zeros((0, observation_size))
        self._index, self._finals = [], []
        return index, torch.from_numpy(rows.astype(np.float32, copy=False))
