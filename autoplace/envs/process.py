"""Environments spread over worker processes, several in each.

Observations, rewards, flags and actions lie in shared memory; per vector step and worker, one byte
goes each way. A worker steps its share by the same loop that steps environments in-process.

The calling process waits meanwhile, or steps a share too: then one process less is started, and
where there is a core for each share none has to make way for the caller.

With ``num_groups`` of 2, each worker's share is in two halves: one half steps while the actions of
the other are computed (split-half sampling). Environments are numbered group by group.

A worker that died, hung or leaked ends the run, or is started anew (:class:`Restarts`). Its
environments then begin new episodes. The step that it was lost in gives a row that is no transition
(:attr:`Step.valid`) and is marked as truncated, so that no trace crosses it; the episode counts as
none.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoplace.cpus import usable_cpus
from autoplace.envs.description import EnvDescription
from autoplace.envs.elsewhere import register_here
from autoplace.envs.make import registered_spec
from autoplace.envs.memory_watch import LOOK_INTERVAL_S, MemoryWatch
from autoplace.envs.sync import SyncVectorEnv
from autoplace.envs.vector import Step
from autoplace.envs.workers import (
    AWAKE_S,
    DEADLINE_S,
    QUIT,
    READY,
    Channel,
    SharedArrays,
    WorkerLostError,
    Workers,
)
from autoplace.errors import EnvError, UsageError

log = logging.getLogger(__name__)

_STEPS = (b"0", b"1")  # one signal per group
_RESETS = (b"a", b"b")
_RUNNING, _ENDED = b".", b"e"  # whether any episode ended in the step


@dataclass(slots=True)
class Restarts:
    """Whether workers that are lost are started anew.

    Attributes:
        allowed: whether they are.
        count: how often it was done.
    """

    allowed: bool = False
    count: int = 0


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
        num_workers: processes that step environments.
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
        joins: bool = False,
        deadline_s: float = DEADLINE_S,
        restarts: Restarts | None = None,
        use_threads: bool = False,
    ) -> None:
        """Start the workers and make the environments in them.

        Args:
            description: of each environment.
            num_envs: how many.
            num_workers: processes; not more than there are environments in a group are started.
            num_groups: 2 for split-half sampling.
            joins: whether the calling process is one of those, and steps the first share; in one
                group only. Nothing starts it anew where that share fails.
            deadline_s: how long a vector step may take until its worker counts as hung.
            restarts: what becomes of a worker that is lost; by default it ends the run.
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
        self._restarts = restarts or Restarts()
        self._fresh: list[set[int]] = [set() for _ in groups]  # workers whose part is to be reset
        self._untried: set[int] = set()  # workers that have completed no step since their restart

        registered = registered_spec(description.env)
        split = [_split(start, stop, self.num_workers) for start, stop in groups]
        shares = [
            _Share(description=description, registered=registered, ranges=tuple(ranges))
            for ranges in zip(*split, strict=True)
        ]
        self._own: _Part | None = None
        if joins:
            assert num_groups == 1
            ((start, stop),) = shares.pop(0).ranges
            self._own = _Part(description, views, start, stop)
        self._ranges = [share.ranges for share in shares]
        self.workers = Workers(
            _run_share,
            shares,
            names=[_name(index, share.ranges) for index, share in enumerate(shares)],
            shared=shared,
            deadline_s=deadline_s,
            may_restart=self._restarts.allowed,
            # Awake it would keep a core busy that the workers need: they would crowd on the others.
            awake_s=AWAKE_S if len(shares) < usable_cpus() else 0.0,
            use_threads=use_threads,
        )
        self._indices = range(len(shares))
        self._watch = MemoryWatch(self.workers.pids)
        self._look_s = time.monotonic() + LOOK_INTERVAL_S

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Start every environment afresh, each from its own seed."""
        self.settle()
        self._seeds[:] = seeds
        try:
            for byte in _RESETS[: len(self.groups)]:
                for index in self._indices:
                    self.workers.signal(index, byte)
                if self._own is not None:
                    self._own.reset()
                for index in self._indices:
                    self.workers.wait(index)
        except WorkerLostError:
            self.workers.close()
            raise
        for fresh in self._fresh:
            fresh.clear()
        return self.observations

    def step(self, actions: np.ndarray) -> Step:
        """Step every environment."""
        if len(self.groups) == 1:
            self.step_async(actions)
            return self.step_wait()
        for group, part in enumerate(self.groups):
            self.step_async(actions[part], group)
        valids = [self._wait_for(group)[1] for group in range(len(self.groups))]
        valid = None
        if any(known is not None for known in valids):
            valid = np.ones(self.num_envs, np.bool_)
            for part, known in zip(self.groups, valids, strict=True):
                valid[part] = True if known is None else known
        return self._outcome(slice(0, self.num_envs), True, valid)

    def step_async(self, actions: np.ndarray, group: int = 0) -> None:
        """Let a group of environments begin a step, without waiting.

        Args:
            actions: of the environments of the group.
            group: which; groups are waited for in the order in which they began.
        """
        assert group not in self._pending, group
        self._look_at_memory()
        self._actions[self.groups[group]] = actions
        self._pending.append(group)
        fresh = self._fresh[group]
        for index in self._indices:
            self._signal(index, _RESETS[group] if index in fresh else _STEPS[group])

    def step_wait(self, group: int = 0) -> Step:
        """What the step that a group began gave; indices in it count from the group's first."""
        return self._outcome(self.groups[group], *self._wait_for(group))

    def settle(self) -> None:
        """Wait for the steps of a rollout that was interrupted, and drop them."""
        while self._pending:
            self._wait_for(self._pending[0])

    def close(self) -> None:
        """End the workers."""
        self.workers.close()
        if self._own is not None:
            self._own.close()

    def _signal(self, index: int, byte: bytes) -> None:
        try:
            self.workers.signal(index, byte)
        except WorkerLostError as error:
            self._restart(error)

    def _answer(self, index: int) -> bytes:
        try:
            return self.workers.wait(index)
        except WorkerLostError as error:
            self._restart(error)
            return self._answer(index)

    def _wait_for(self, group: int) -> tuple[bool, np.ndarray | None]:
        """Wait until a group has stepped; whether any episode ended, and :attr:`Step.valid`."""
        assert self._pending and self._pending[0] == group, (self._pending, group)
        any_ended = self._step_own()
        for index in self._indices:
            any_ended |= self._answer(index) == _ENDED
        self._pending.popleft()
        fresh = self._fresh[group]
        self._untried &= fresh
        return any_ended, self._mark_lost(group) if fresh else None

    def _step_own(self) -> bool:
        """Step the caller's share, if it has one; whether any episode ended."""
        try:
            return self._own is not None and self._own.step()
        except EnvError:
            self.close()
            raise

    def _mark_lost(self, group: int) -> np.ndarray:
        """Mark the rows of workers that were restarted in place of a step.

        They were lost before anything of the step was known: neither reward nor end.
        """
        valid = np.ones(self.num_envs, np.bool_)
        for index in self._fresh[group]:
            part = slice(*self._ranges[index][group])
            valid[part], self._rewards[part] = False, 0.0
            self._terminated[part], self._truncated[part] = False, True
        self._fresh[group].clear()
        return valid[self.groups[group]]

    def _restart(self, error: WorkerLostError) -> None:
        """Start a worker anew, and let it reset its part of the groups that are under way.

        Raises:
            EnvError: that is not wanted, or was done before and has not helped.
        """
        index, restarts = error.index, self._restarts
        if not restarts.allowed:
            raise error
        if index in self._untried:
            self.workers.close()
            raise EnvError(f"{error}; it had been restarted and has not completed a step since")
        restarts.count += 1
        log.warning("%s; it is restarted, and its environments begin new episodes", error)
        self.workers.restart(index)
        self._watch.replace(index, self.workers.pids[index])
        self._untried.add(index)
        for start, stop in self._ranges[index]:
            entropies = [(int(seed), restarts.count) for seed in self._seeds[start:stop]]
            self._seeds[start:stop] = [
                np.random.SeedSequence(entropy).generate_state(1)[0] for entropy in entropies
            ]
        for fresh in self._fresh:
            fresh.add(index)
        for group in self._pending:
            self.workers.signal(index, _RESETS[group])

    def _look_at_memory(self) -> None:
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + LOOK_INTERVAL_S
        found = self._watch.leaking()
        if found is not None:
            try:
                self.workers.lose(*found)
            except WorkerLostError as error:
                self._restart(error)

    def _outcome(self, part: slice, any_ended: bool, valid: np.ndarray | None) -> Step:
        terminated, truncated = self._terminated[part], self._truncated[part]
        ended: Sequence[int] = ()
        finals = self._none
        if any_ended:
            over = terminated | truncated
            ended = np.flatnonzero(over if valid is None else over & valid).tolist()
            finals = self._finals[part][ended]
        return Step(
            self.observations[part],
            self._rewards[part],
            terminated,
            truncated,
            ended,
            finals,
            valid,
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
    register_here(share.registered)
    views = shared.views()
    groups = [_Part(share.description, views, start, stop) for start, stop in share.ranges]
    try:
        channel.signal(READY)
        while True:
            order = channel.wait()
            if order == QUIT:
                return
            if order in _RESETS:
                groups[_RESETS.index(order)].reset()
                channel.signal(READY)
            else:
                ended = groups[_STEPS.index(order)].step()
                channel.signal(_ENDED if ended else _RUNNING)
    finally:
        for group in groups:
            group.close()


class _Part:
    """Environments of one process that step together, between the shared arrays."""

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
