"""The small interface behind which environments are stepped together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autoplace.envs.description import EnvDescription


@dataclass(slots=True)
class Step:
    """What one vector step gave. The arrays belong to the vector env, which reuses them.

    What an environment ended in is in ``final_observations``. Usually it has been reset already:
    its row of ``observations`` starts the next episode, and every step is a real transition. A
    backend that spends a vector step on resets marks the rows of that step in ``valid``.

    Attributes:
        observations: ``[N, D]`` float32, what to act on next.
        rewards: ``[N]`` float32.
        terminated: ``[N]`` bool.
        truncated: ``[N]`` bool.
        ended: indices of environments whose episode ended in this step.
        final_observations: ``[len(ended), D]`` float32, the last observation of each of those.
        valid: ``[N]`` bool, false where the action was ignored because the step only reset the
            environment: no transition, nothing to learn from. ``None`` where all are real.
    """

    observations: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    ended: Sequence[int]
    final_observations: np.ndarray
    valid: np.ndarray | None = None


class VectorEnv(Protocol):
    """``N`` environments that are stepped together.

    Attributes:
        num_envs: ``N``.
        description: the sizes of each.
        observations: ``[N, D]`` float32, what to act on next; the same buffer for life.
    """

    num_envs: int
    description: EnvDescription
    observations: np.ndarray

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Start every environment afresh, each from its own seed; returns ``observations``."""
        ...

    def step(self, actions: np.ndarray) -> Step:
        """Step all with a policy's actions: ``[N]`` int64, or ``[N, A]`` float32 unclipped."""
        ...

    def close(self) -> None:
        """Free what the environments hold."""
        ...


def spawn_seeds(seed: int, num_envs: int, *, stream: int = 0) -> list[int]:
    """Seeds that neither environments nor runs share, as ``seed + i`` would.

    Args:
        seed: of the run.
        num_envs: how many are needed.
        stream: keeps apart what one run resets at different times (0 at its start).
    """
    children = np.random.SeedSequence((seed, stream))
    return [int(child.generate_state(1)[0]) for child in children.spawn(num_envs)]
