"""What a scheme is: work without a cost, and when it happens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoplace.device_names import CPU
from autoplace.engines import EAGER, FP32, engine_on, precision_problem
from autoplace.measurement import Task
from autoplace.planner.backends import SPREAD
from autoplace.planner.placements import Placements, partial
from autoplace.planner.plan import Placement
from autoplace.workload import Workload

Array = NDArray[np.float64]
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
class Rule:
    """How one kind of work follows from a placement.

    Attributes:
        fields: of a placement that it depends on; no others can be read.
        make: the work, ``None`` where there is none.
    """

    fields: tuple[str, ...]
    make: Callable[[Workload, Placement], Work | None]

    def __call__(self, workload: Workload, values: Sequence[Any]) -> Work | None:
        """The work of placements that have these values of the fields."""
        return self.make(workload, partial(self.fields, values))


def reads(*fields: str) -> Callable[[Callable[[Workload, Placement], Work | None]], Rule]:
    """Make a function a rule that depends on these fields of a placement."""
    return lambda make: Rule(fields=fields, make=make)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When a kind of work (or a wait) first starts, and how long all of it lasts.

    One entry ``[N]`` for each placement; a wait of no length is none.
    """

    name: str
    lane: str
    start_s: Array
    total_s: Array


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
    """What a layout is made from, one entry ``[N]`` for each placement.

    Attributes:
        seconds: of each kind of work, where nothing else runs at the same time; 0 where a placement
            has none of it.
        steps: vector steps in a rollout.
        usable_cpus: cores that all threads at work share.
        slowdown: how many times as long a stage takes, given its name, its own threads and the
            other cores that are busy (:meth:`autoplace.contention.Contention.factor`).
        unevenness: how far from evenly cores are shared by more processes than there are, given the
            seconds that these work (:meth:`autoplace.contention.Contention.unevenness`).
        env_spread_fraction: standard deviation of the time of one vector step over its mean.
    """

    seconds: Mapping[Key, Array]
    steps: NDArray[np.int_]
    usable_cpus: int
    slowdown: Callable[[str, NDArray[np.int_], NDArray[np.int_]], Array]
    unevenness: Callable[[Array], Array]
    env_spread_fraction: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How an iteration is laid out on the devices.

    Attributes:
        name: as users write it.
        placements: every placement worth costing, given the free values and the number of envs.
        work: what an iteration consists of, each (stage name, lane) once.
        layout: when it happens.
        policy_lag: iterations that the policy which samples is behind the one which learns, at
            least.
    """

    name: str
    placements: Callable[[Axes, int, int], Placements]
    work: tuple[Rule, ...]
    layout: Callable[[Timing, Placements], tuple[Span, ...]]
    policy_lag: int = 0


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
    policy_lags: Sequence[int] = (0,),
) -> Placements:
    """Every combination of sides and chunk lengths with the values that any scheme may take.

    Split-half sampling keeps the policy's threads and all workers busy at once, so it is proposed
    where there is a core for each.

    Args:
        axes: those values.
        num_envs: environments stepped together.
        sides: of the scheme.
        intervals: chunk lengths.
        backends: (vector backend, processes), where they are not those of ``axes``.
        policy_lags: iterations that the policy which samples may be behind.
    """
    may_split = backends is None
    engines = [
        (engine, *side)
        for engine, side in itertools.product(axes.engines, sides)
        if any(engine_on(engine, on) == engine for on in side[:2])  # else it would run nothing
        and (engine == EAGER or (axes.precision, axes.accumulation_steps) == (FP32, 1))
        and not precision_problem(axes.precision, side.learn_device)
    ]
    entries = axes.env_backends if backends is None else backends
    if not (engines and entries and policy_lags):
        return Placements.empty()
    names = ("engine", "sample_device", "learn_device", "sample_threads", "learn_threads")
    where = dict(zip(names, zip(*engines, strict=True), strict=True))
    found = Placements.product(
        {"max_policy_lag": policy_lags},
        dict(zip(("env_backend", "num_workers"), zip(*entries, strict=True), strict=True)),
        {**where, "device": where["learn_device"]},
        {"minibatch_rows": axes.minibatch_rows},
        {"transfer_interval_steps": intervals},
        {"num_groups": (1, 2) if may_split else (1,)},
        {
            "num_envs": (num_envs,),
            "precision": (axes.precision,),
            "accumulation_steps": (axes.accumulation_steps,),
        },
    )
    workers = found.num_workers
    free = axes.usable_cpus - found.sample_threads  # cores that are not the policy's
    splits = (found.sample_device == CPU) & (found.env_backend == SPREAD) & (workers <= free)
    found = found.where((found.num_groups == 1) | splits & (2 * workers <= num_envs))
    if len(axes.sample_threads) == 1:  # nothing to choose
        return found
    # Threads of a policy step go on waiting for the next one while the workers need their cores.
    waiting = np.where(found.sample_device == CPU, found.sample_threads - 1, 0)
    return found.where((waiting == 0) | (found.num_workers + waiting <= axes.usable_cpus))
