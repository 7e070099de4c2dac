"""Environments spread over worker processes, several in each.

Observations, rewards, flags and actions lie in shared memory; per vector step and worker, one byte
goes each way. A worker steps its share by the same loop that steps environments in-process.

With ``num_groups`` of 2, each worker's share is in two halves: one half steps while the actions of
the other are computed (split-half sampling). Environments are numbered group by group.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from autoplace.envs.description import EnvDescription
from autoplace.envs.make import registered_spec
from autoplace.envs.sync import SyncVectorEnv
from autoplace.envs.vector import Step
from autoplace.envs.workers import DEADLINE_S, QUIT, READY, Channel, SharedArrays, Workers
from autoplace.errors import UsageError

_RESET = b"r"
_STEPS = (b"0", b"1", b"2", b"3")  # one signal per group
_RUNNING, _ENDED = b".", b"e"  # whether any episode ended in the step


@dataclass(frozen=True, kw_only=True)
class _Share:
    """What one worker runs.

    Attributes:
        description: of each environment.
        registered: what Gymnasium has registered under its name here; the worker may not know it.
        ranges: (first, one past the last) environment of each group.
    """

    description: EnvDescription
    registered: Any
    ranges: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return self.description.env.id


class ProcessVectorEnv:
    """``N`` environments in worker processes; see :class:`autoplace.envs.vector.VectorEnv`.

    Attributes:
        num_workers: processes.
        groups: the environments of each group, as slices of every array.
        workers: the processes and their channels.
    """

    def __init__(
        self,
        description: EnvDescription,
        num_envs: int,
        *,
        num_workers: int,
        num_groups: int = 1,
        deadline_s: float = DEADLINE_S,
        use_threads: bool = False,
    ) -> None:
        """Start the workers and make the environments in them.

        Args:
            description: of each environment.
            num_envs: how many.
            num_workers: processes; not more than there are environments in a group are started.
            num_groups: 2 for split-half sampling.
            deadline_s: how long a vector step may take until its worker counts as hung.
            use_threads: run the workers as threads, for tests.

        Raises:
            UsageError: the numbers do not fit together.
            EnvError: an environment cannot be made, or a worker failed.
        """
        if num_workers < 1:
            raise UsageError(f"--num-workers must be at least 1, got {num_workers}: raise it")
        if not 1 <= num_groups <= min(len(_STEPS), num_envs):
            raise UsageError(
                f"{num_envs} environments cannot be stepped in {num_groups} groups: use 1 or 2"
            )
        self.description = description
        self.num_envs = num_envs
        codec = description.observations
        groups = _split(0, num_envs, num_groups)
        self.num_workers = min(num_workers, *(stop - start for start, stop in groups))
        self.groups = tuple(slice(start, stop) for start, stop in groups)

        shared = SharedArrays(_layout(description, num_envs))
        views = shared.views()
        self.observations = views["observations"]
        self._finals, self._rewards = views["finals"], views["rewards"]
        self._terminated, self._truncated = views["terminated"], views["truncated"]
        self._actions, self._seeds = views["actions"], views["seeds"]
        self._none = np.zeros((0, codec.size), codec.dtype)
        self._pending: deque[int] = deque()

        registered = registered_spec(description.env)
        split = [_split(start, stop, self.num_workers) for start, stop in groups]
        shares = [
            _Share(description=description, registered=registered, ranges=tuple(ranges))
            for ranges in zip(*split, strict=True)
        ]
        self.workers = Workers(
            _run_share,
            shares,
            names=[_name(index, share.ranges) for index, share in enumerate(shares)],
            shared=shared,
            deadline_s=deadline_s,
            use_threads=use_threads,
        )
        self._indices = range(self.num_workers)

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Start every environment afresh, each from its own seed."""
        self.settle()
        self._seeds[:] = seeds
        for index in self._indices:
            self.workers.signal(index, _RESET)
        for index in self._indices:
            self.workers.wait(index)
        return self.observations

    def step(self, actions: np.ndarray) -> Step:
        """Step every environment."""
        if len(self.groups) == 1:
            self.step_async(actions)
            return self.step_wait()
        for group, part in enumerate(self.groups):
            self.step_async(actions[part], group)
        for group in range(len(self.groups)):
            self._wait_for(group)
        return self._outcome(slice(0, self.num_envs), True)

    def step_async(self, actions: np.ndarray, group: int = 0) -> None:
        """Let a group of environments begin a step, without waiting.

        Args:
            actions: of the environments of the group.
            group: which; groups are waited for in the order in which they began.
        """
        assert group not in self._pending, group
        self._actions[self.groups[group]] = actions
        self._pending.append(group)
        signal, byte = self.workers.signal, _STEPS[group]
        for index in self._indices:
            signal(index, byte)

    def step_wait(self, group: int = 0) -> Step:
        """What the step that a group began gave; indices in it count from the group's first."""
        return self._outcome(self.groups[group], self._wait_for(group))

    def settle(self) -> None:
        """Wait for the steps of a rollout that was interrupted, and drop them."""
        while self._pending:
            self._wait_for(self._pending[0])

    def close(self) -> None:
        """End the workers."""
        self.workers.close()

    def _wait_for(self, group: int) -> bool:
        """Wait until a group has stepped; whether any of its episodes ended."""
        assert self._pending and self._pending[0] == group, (self._pending, group)
        wait = self.workers.wait
        ended = False
        for index in self._indices:
            ended |= wait(index) == _ENDED
        self._pending.popleft()
        return ended

    def _outcome(self, part: slice, any_ended: bool) -> Step:
        terminated, truncated = self._terminated[part], self._truncated[part]
        ended: Sequence[int] = ()
        finals = self._none
        if any_ended:
            ended = np.flatnonzero(terminated | truncated).tolist()
            finals = self._finals[part][ended]
        return Step(
            self.observations[part], self._rewards[part], terminated, truncated, ended, finals
        )


def _layout(description: EnvDescription, num_envs: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shared arrays: shape and type by name."""
    codec, action = description.observations, description.actions
    actions: tuple[tuple[int, ...], str] = ((num_envs,), "int64")
    if action.continuous:
        actions = ((num_envs, action.size), "float32")
    elif action.heads:
        actions = ((num_envs, len(action.heads)), "int64")
    rows = ((num_envs, codec.size), codec.dtype)
    return {
        "observations": rows,
        "finals": rows,
        "rewards": ((num_envs,), "float32"),
        "terminated": ((num_envs,), "bool"),
        "truncated": ((num_envs,), "bool"),
        "actions": actions,
        "seeds": ((num_envs,), "int64"),
    }


def _split(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """``parts`` ranges that cover ``start``..``stop`` and differ in length by at most one."""
    edges = [start + (stop - start) * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(edges))


def _name(index: int, ranges: Sequence[tuple[int, int]]) -> str:
    parts = [f"{a}" if b - a == 1 else f"{a}-{b - 1}" for a, b in ranges]
    return f"environment worker {index} (environments {', '.join(parts)})"


def _run_share(channel: Channel, share: _Share, shared: SharedArrays) -> None:
    """What a worker does: step its environments whenever it is told to."""
    if share.registered is not None:
        gym.registry[share.registered.id] = share.registered
    views = shared.views()
    groups = [_Group(share.description, views, start, stop) for start, stop in share.ranges]
    try:
        channel.signal(READY)
        while True:
            order = channel.wait()
            if order == QUIT:
                return
            if order == _RESET:
                for group in groups:
                    group.reset()
                channel.signal(READY)
            else:
                ended = groups[_STEPS.index(order)].step()
                channel.signal(_ENDED if ended else _RUNNING)
    finally:
        for group in groups:
            group.close()


class _Group:
    """Environments of one worker that step together, between the shared arrays."""

    def __init__(
        self, description: EnvDescription, views: dict[str, np.ndarray], start: int, stop: int
    ) -> None:
        own = {name: view[start:stop] for name, view in views.items()}
        self._actions, self._seeds = own["actions"], own["seeds"]
        self._observations, self._finals = own["observations"], own["finals"]
        self._rewards = own["rewards"]
        self._terminated, self._truncated = own["terminated"], own["truncated"]
        self._envs = SyncVectorEnv(description, stop - start, first_index=start)
        self.close = self._envs.close

    def reset(self) -> None:
        self._observations[...] = self._envs.reset(self._seeds.tolist())

    def step(self) -> bool:
        step = self._envs.step(self._actions)
        self._observations[...] = step.observations
        self._rewards[...] = step.rewards
        self._terminated[...] = step.terminated
        self._truncated[...] = step.truncated
        if step.ended:
            self._finals[step.ended] = step.final_observations
            return True
        return False
