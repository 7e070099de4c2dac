"""The small interface behind which environments are stepped together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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
            environment: no transition, nothing to learn from. ``None`` where all are real. A row
            that is not valid but truncated was lost with the rest of its episode.
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


@runtime_checkable
class GroupedVectorEnv(Protocol):
    """Environments in groups that step at different times.

    Attributes:
        groups: the environments of each group, as slices of every array.
        observations: ``[N, D]`` of all; a group's rows hold still while it does not step.
    """

    groups: tuple[slice, ...]
    observations: np.ndarray

    def step_async(self, actions: np.ndarray, group: int = 0) -> None:
        """Let a group begin a step with the actions of its environments."""
        ...

    def step_wait(self, group: int = 0) -> Step:
        """What the step that a group began gave; indices in it count from the group's first.

        Groups are waited for in the order in which they began.
        """
        ...

    def settle(self) -> None:
        """Wait for what was begun, of a rollout that was interrupted, and drop it."""
        ...


class OneGroup:
    """A vector env that is stepped as a whole, as a :class:`GroupedVectorEnv`."""

    def __init__(self, envs: VectorEnv) -> None:
        self.observations = envs.observations
        self.groups: tuple[slice, ...] = (slice(0, envs.num_envs),)
        self._envs = envs
        self._actions: np.ndarray | None = None

    def step_async(self, actions: np.ndarray, group: int = 0) -> None:
        """Remember the actions."""
        self._actions = actions

    def step_wait(self, group: int = 0) -> Step:
        """Step."""
        assert self._actions is not None
        return self._envs.step(self._actions)

    def settle(self) -> None:
        """Nothing goes on by itself."""


def in_groups(envs: VectorEnv) -> GroupedVectorEnv:
    """Environments as groups: their own, or one of all."""
    if isinstance(envs, GroupedVectorEnv):
        return envs
    return OneGroup(envs)


def spawn_seeds(seed: int, num_envs: int, *, stream: int = 0) -> list[int]:
    """Seeds that neither environments nor runs share, as ``seed + i`` would.

    Args:
        seed: of the run.
        num_envs: how many are needed.
        stream: keeps apart what one run resets at different times (0 at its start).
    """
    children = np.random.SeedSequence((seed, stream))
    return [int(child.generate_state(1)[0]) for child in children.spawn(num_envs)]
