"""What a scheme is: work without a cost, and when it happens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoplace.device_names import CPU
from autoplace.engines import EAGER, FP32, engine_on, precision_problem
from autoplace.measurement import Task
from autoplace.planner.plan import Placement
from autoplace.workload import Workload

Key = tuple[str, str]  # (stage name, lane)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kind of work of an iteration.

    Attributes:
        name: stage name.
        lane: where it runs.
        calls: how often the stage runs in an iteration.
        parts: the tasks it consists of, each with how often it runs in an iteration.
    """

    name: str
    lane: str
    calls: int
    parts: tuple[tuple[Task, float], ...]

    @property
    def key(self) -> Key:
        """(name, lane), unique within an iteration."""
        return self.name, self.lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When a kind of work (or a wait) first starts, and how long all of it lasts."""

    name: str
    lane: str
    start_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The values that each free part of a placement may take on one machine.

    Attributes:
        accelerators: canonical names, best known first.
        sample_threads: thread counts with timings, for a policy on the CPU.
        learn_threads: thread counts with timings, for a learner on the CPU.
        minibatch_rows: the declared choices, or the user's one.
        transfer_intervals: vector steps per chunk.
        env_backends: (vector backend, worker processes) with a measured step time.
        samplers: (vector backend, sampler processes) that environments may be shared out to.
        policy_lags: iterations that the policy which samples may be behind, where sides overlap.
        usable_cpus: cores that samplers and learners at work together may share out.
        engines: ways to execute the trainer's steps that have timings.
        precision: of gradient steps; never chosen, since it changes what is learned.
        accumulation_steps: backward passes that make one gradient step, likewise.
    """

    accelerators: tuple[str, ...]
    sample_threads: tuple[int, ...]
    learn_threads: tuple[int, ...]
    minibatch_rows: tuple[int, ...]
    transfer_intervals: tuple[int, ...]
    env_backends: tuple[tuple[str, int], ...]
    samplers: tuple[tuple[str, int], ...] = ()
    policy_lags: tuple[int, ...] = (1,)
    usable_cpus: int = 1
    engines: tuple[str, ...] = ("eager",)
    precision: str = FP32
    accumulation_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What a layout is made from.

    Attributes:
        seconds: of each kind of work, where nothing else runs at the same time.
        steps: vector steps in a rollout.
        usable_cpus: cores that all threads at work share.
        slowdown: how many times as long a stage takes, given its name, its own threads and the
            other cores that are busy (:meth:`autoplace.contention.Contention.factor`).
        env_spread_fraction: standard deviation of the time of one vector step over its mean.
    """

    seconds: Mapping[Key, float]
    steps: int
    usable_cpus: int = 1
    slowdown: Callable[[str, int, int], float] = lambda stage, threads, busy: 1.0
    env_spread_fraction: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How an iteration is laid out on the devices.

    Attributes:
        name: as users write it.
        placements: every placement worth costing, given the free values and the number of envs.
        work: what an iteration consists of.
        layout: when it happens.
        policy_lag: iterations that the policy which samples is behind the one which learns, at
            least.
        learner_processes: that are started beside the processes that step environments.
    """

    name: str
    placements: Callable[[Axes, int, int], Iterator[Placement]]
    work: Callable[[Workload, Placement], tuple[Work, ...]]
    layout: Callable[[Timing, Placement], tuple[Span, ...]]
    policy_lag: int = 0
    learner_processes: int = 0


class Sides(NamedTuple):
    """Where each side of an iteration runs, with how many threads of the CPU."""

    sample_device: str
    learn_device: str
    sample_threads: int = 1
    learn_threads: int = 1


def combinations(
    axes: Axes,
    num_envs: int,
    sides: Sequence[Sides],
    intervals: Sequence[int],
    *,
    backends: Sequence[tuple[str, int]] | None = None,
    policy_lag: int = 0,
) -> Iterator[Placement]:
    """Every combination of sides and chunk lengths with the values that any scheme may take.

    Split-half sampling keeps the policy's threads and all workers busy at once, so it is proposed
    where there is a core for each.

    Args:
        axes: those values.
        num_envs: environments stepped together.
        sides: of the scheme.
        intervals: chunk lengths.
        backends: (vector backend, processes), where they are not those of ``axes``.
        policy_lag: iterations that the policy which samples may be behind.
    """
    for (backend, workers), engine, where, rows, interval in itertools.product(
        axes.env_backends if backends is None else backends,
        axes.engines,
        sides,
        axes.minibatch_rows,
        intervals,
    ):
        if all(engine_on(engine, on) != engine for on in where[:2]):
            continue  # it would run nothing
        if engine != EAGER and (axes.precision, axes.accumulation_steps) != (FP32, 1):
            continue  # other engines have neither
        if precision_problem(axes.precision, where.learn_device):
            continue
        free = axes.usable_cpus - where.sample_threads  # cores that are not the policy's
        splits = backends is None and where.sample_device == CPU and 0 < workers <= free
        yield from (
            Placement(
                device=where.learn_device,
                sample_device=where.sample_device,
                learn_device=where.learn_device,
                transfer_interval_steps=interval,
                minibatch_rows=rows,
                num_envs=num_envs,
                env_backend=backend,
                num_workers=workers,
                num_groups=groups,
                sample_threads=where.sample_threads,
                learn_threads=where.learn_threads,
                engine=engine,
                precision=axes.precision,
                accumulation_steps=axes.accumulation_steps,
                max_policy_lag=policy_lag,
            )
            for groups in ((1, 2) if splits and 2 * workers <= num_envs else (1,))
        )
