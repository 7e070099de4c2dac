"""The placements of a workload, each with its predicted cost, as arrays.

Every kind of work is costed once per combination of the fields that it depends on, and every scheme
lays all of its placements out at once. Several workloads (*variants*) are costed together: most of
the time goes into calls, not into numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoplace.contention import Contention
from autoplace.cost_model import Cost, CostModel
from autoplace.measurement import PROCESS_START, Calibration, Measurement, Task, env_start
from autoplace.planner import memory
from autoplace.planner.backends import STARTING_FIELDS, started_by
from autoplace.planner.choices import lag_efficiency, matching, minibatch_efficiency
from autoplace.planner.engine_gain import setup_s
from autoplace.planner.placements import Codes, Placements, partial
from autoplace.planner.plan import Placement
from autoplace.planner.schemes import Axes, Key, Scheme, Span, Timing, Work
from autoplace.planner.schemes.base import Array, Rule
from autoplace.planner.schemes.layout import busy_s
from autoplace.workload import Workload

# What is left at least of a vector step whose environments are thought faster.
_LEAST_SHARE = 0.02


class Variant(NamedTuple):
    """What is placed.

    ``env_extra_s`` are seconds by which each step of one environment takes longer than was
    measured, ``total_steps`` the length of the run, ``None`` where that is of no account.
    """

    workload: Workload
    axes: Axes
    total_steps: int | None = None
    env_extra_s: float = 0.0


class Kind(NamedTuple):
    """One kind of work of all placements of a scheme.

    ``works`` are those that differ, ``variants`` what each of them is of, and ``which`` of them
    each placement has.
    """

    works: list[Work | None]
    variants: list[int]
    which: Codes


class Rejected(NamedTuple):
    """Placements of a scheme that may not run, and the reason for each."""

    scheme: Scheme
    placements: Placements
    reasons: list[str]


@dataclass(frozen=True, kw_only=True)
class SchemeSpace:
    """The legal placements of one scheme, an entry ``[N]`` of every array for each.

    Attributes:
        scheme: of all.
        placements: the rows.
        work: by (stage name, lane).
        seconds: of it, where nothing else runs at the same time.
        spans: the iteration.
        iteration_s: its length.
        env_steps_per_s: without rows that only reset.
        efficiency: relative sample efficiency.
        start_turns: starts of processes, one after the other, by the task that one of them is,
            where that has a cost.
        one_off_s: seconds of those, and what an engine takes once.
        start_share: of the time that all iterations take.
    """

    scheme: Scheme
    placements: Placements
    work: Mapping[Key, Kind]
    seconds: Mapping[Key, Array]
    spans: tuple[Span, ...]
    iteration_s: Array
    env_steps_per_s: Array
    efficiency: Array
    start_turns: Mapping[Task, Array]
    one_off_s: Array
    start_share: Array

    @functools.cached_property
    def score(self) -> Array:
        """What placements are ranked by."""
        return self.env_steps_per_s * self.efficiency / (1 + self.start_share)


class Costed(NamedTuple):
    """One costed placement: a row of a space."""

    space: SchemeSpace
    row: int

    @property
    def scheme(self) -> Scheme:
        """How its iterations are laid out."""
        return self.space.scheme

    @property
    def placement(self) -> Placement:
        """By itself."""
        return self.space.placements.placement(self.row)

    @property
    def score(self) -> float:
        """What it is ranked by."""
        return float(self.space.score[self.row])

    @property
    def iteration_s(self) -> float:
        """Predicted seconds of one iteration."""
        return float(self.space.iteration_s[self.row])

    @property
    def works(self) -> list[Work]:
        """What an iteration consists of."""
        found = (known.works[known.which[self.row]] for known in self.space.work.values())
        return [work for work in found if work is not None]

    @property
    def rates(self) -> dict[Task, float]:
        """How often each task runs in a second of the whole run."""
        space, row = self.space, self.row
        rates = task_calls(self.works)
        start, one_off_s = float(space.start_share[row]), float(space.one_off_s[row])
        for task, turns in space.start_turns.items():
            if turns[row]:
                rates[task] = start * self.iteration_s * float(turns[row]) / one_off_s
        run_s = self.iteration_s * (1 + start)
        return {task: calls / run_s for task, calls in rates.items()}


def task_calls(works: Sequence[Work]) -> dict[Task, float]:
    """How often each task runs in an iteration."""
    found: dict[Task, float] = {}
    for work in works:
        for task, calls in work.parts:
            found[task] = found.get(task, 0.0) + calls
    return found


def envs_in_turn(task: Task) -> int:
    """Environments that one process steps one after the other."""
    return math.ceil(task.num_envs / max(1, task.workers))


# --------------------------------------------------------------------------------------------------
# Costs


class Coster:
    """Costs placements on one calibrated machine; the costs of tasks are kept between calls."""

    def __init__(
        self,
        calibration: Calibration,
        model: CostModel,
        limits: memory.Limits | None,
        given: Mapping[str, object],
    ) -> None:
        self.costs: dict[Task, Cost] = {}
        if PROCESS_START in calibration.by_task:
            self.costs = model.predict([PROCESS_START])
        self._calibration = calibration
        self._model = model
        self._limits = limits
        self._given = given
        self._usable_cpus = calibration.machine.usable_cpus
        self._contention = Contention(calibration)
        self._slowdown = _on_arrays(self._contention.factor)
        self._tables: dict[tuple[str, Axes, int, int], Placements] = {}

    def cost(
        self, schemes: Sequence[Scheme], variants: Sequence[Variant]
    ) -> tuple[list[SchemeSpace], list[Rejected]]:
        """All placements of several workloads, costed or rejected, by scheme."""
        made: dict[tuple[object, ...], Work | None] = {}
        rejected, legal = [], []
        for scheme in schemes:
            found = Placements.stack([self._table(scheme, variant) for variant in variants])
            found, others = self._fitting(scheme, matching(found, self._given), variants)
            if others.reasons:
                rejected.append(others)
            if len(found):
                kinds = [_kind(rule, found, variants, made) for rule in scheme.work]
                legal.append((scheme, found, kinds))
        tasks = (task for work in made.values() if work is not None for task, _ in work.parts)
        missing = [task for task in dict.fromkeys(tasks) if task not in self.costs]
        self.costs.update(self._model.predict(missing, within_run=True))
        return [self._space(variants, *entry) for entry in legal], rejected

    def _table(self, scheme: Scheme, variant: Variant) -> Placements:
        hyper = variant.workload.hyperparameters
        key = (scheme.name, variant.axes, hyper.num_envs, hyper.rollout_steps)
        if key not in self._tables:
            self._tables[key] = scheme.placements(*key[1:])
        return self._tables[key]

    def _fitting(
        self, scheme: Scheme, placements: Placements, variants: Sequence[Variant]
    ) -> tuple[Placements, Rejected]:
        """Those that fit into memory, and those that do not."""
        values, which = placements.distinct("variant", *memory.FIELDS)
        held = [memory.EnvMemory.of(self._calibration, v.workload.env) for v in variants]
        found = [
            memory.too_large(
                variants[v].workload, partial(memory.FIELDS, rest), self._limits, held[v]
            )
            for v, *rest in values
        ]
        fits = np.array([reason is None for reason in found], dtype=np.bool_)[which]
        reasons = [str(found[index]) for index in which[~fits]]
        return placements.where(fits), Rejected(scheme, placements.where(~fits), reasons)

    def _space(
        self,
        variants: Sequence[Variant],
        scheme: Scheme,
        placements: Placements,
        kinds: Sequence[Kind],
    ) -> SchemeSpace:
        variant = placements.variant
        work = {one.key: kind for kind in kinds for one in kind.works if one is not None}
        seconds = {
            key: np.array(
                [
                    0.0 if one is None else self._seconds(one, variants[v].env_extra_s)
                    for one, v in zip(kind.works, kind.variants, strict=True)
                ]
            )[kind.which]
            for key, kind in work.items()
        }
        # One half steps while the other's actions are computed: the slower lane counts, and the
        # sampler sees of the steps only what it has to wait for.
        step_s, policy_s = seconds["env_step", "sampler"], seconds["policy_step", "sampler"]
        hidden_s = np.where(placements.num_groups > 1, policy_s, 0.0)
        seconds["env_step", "sampler"] = np.maximum(step_s - hidden_s, 0.0)
        steps = np.array([v.workload.hyperparameters.rollout_steps for v in variants])[variant]
        valid_fraction, spread_fraction = self._measured_steps(work["env_step", "sampler"])
        timing = Timing(
            seconds=seconds,
            steps=steps,
            usable_cpus=self._usable_cpus,
            slowdown=self._slowdown,
            unevenness=self._contention.unevenness,
            env_spread_fraction=spread_fraction,
        )
        spans = scheme.layout(timing, placements)
        iteration_s = busy_s([span for span in spans if span.lane == "sampler"])
        rate = steps * placements.num_envs * valid_fraction / iteration_s
        turns = self._start_turns(placements, variants)
        one_off_s = self._setup_s(placements, variants)
        for task, count in turns.items():
            one_off_s = one_off_s + count * self.costs[task].seconds
        total_steps = np.array([v.total_steps or math.inf for v in variants])
        return SchemeSpace(
            scheme=scheme,
            placements=placements,
            work=work,
            seconds=seconds,
            spans=spans,
            iteration_s=iteration_s,
            env_steps_per_s=rate,
            efficiency=_efficiency(placements, variants),
            start_turns=turns,
            one_off_s=one_off_s,
            start_share=one_off_s * rate / total_steps[variant],
        )

    def _start_turns(
        self, placements: Placements, variants: Sequence[Variant]
    ) -> dict[Task, Array]:
        """Starts of processes, as if one after the other, by the task that one of them is.

        All start at once: that takes as long as the slowest, or where there are fewer CPUs than
        processes as long as those have to work for all.
        """
        if PROCESS_START not in self.costs:
            return {}
        values, which = placements.distinct("variant", *STARTING_FIELDS)
        turns: dict[Task, Array] = {}
        for index, (v, *rest) in enumerate(values):
            workload = variants[v].workload
            started = started_by(partial(STARTING_FIELDS, rest), is_plain=workload.network.is_plain)
            light = self._light_start(workload)
            found = {light: float(started.without_torch)}
            found[PROCESS_START] = found.get(PROCESS_START, 0.0) + started.with_torch
            work_s = sum(count * self.costs[task].seconds for task, count in found.items())
            longest = max(
                (t for t, count in found.items() if count), default=None, key=self._start_s
            )
            if longest is not None and self._start_s(longest) >= work_s / self._usable_cpus:
                found = {longest: float(self._usable_cpus)}
            for task, count in found.items():
                turns.setdefault(task, np.zeros(len(values)))[index] = count / self._usable_cpus
        return {task: count[which] for task, count in turns.items()}

    def _start_s(self, task: Task) -> float:
        return self.costs[task].seconds

    def _light_start(self, workload: Workload) -> Task:
        """The start of a process without torch, as far as that was timed."""
        task = env_start(workload.env)
        if task not in self._calibration.by_task:
            return PROCESS_START
        if task not in self.costs:
            self.costs.update(self._model.predict([task]))
        return task

    def _setup_s(self, placements: Placements, variants: Sequence[Variant]) -> Array:
        """Seconds that the engine of each placement takes once."""
        fields = ("engine", "sample_device", "learn_device")
        values, which = placements.distinct("variant", *fields)
        seconds: Array = np.array(
            [
                setup_s(self._calibration, partial(fields, rest), variants[v].workload.network)
                for v, *rest in values
            ]
        )
        return seconds[which]

    def _seconds(self, work: Work, env_extra_s: float) -> float:
        return sum(calls * self._task_s(task, env_extra_s) for task, calls in work.parts)

    def _task_s(self, task: Task, env_extra_s: float) -> float:
        seconds = self.costs[task].seconds
        if env_extra_s and task.op == "env_step":
            # What a message to a worker takes stays as it is.
            return max(seconds + env_extra_s * envs_in_turn(task), _LEAST_SHARE * seconds)
        return seconds

    def _measured_steps(self, steps: Kind) -> tuple[Array, Array]:
        """Share of rows that are env steps, and spread of a vector step, of each placement."""
        found = []
        for work in steps.works:
            assert work is not None
            ((task, _),) = work.parts
            nearest = self._model.nearest_env_step(task)
            found.append(
                (nearest.expected_valid_fraction, _spread_fraction(nearest, task.num_envs))
            )
        valid, spread = np.array(found)[steps.which].T
        return valid, spread


def _kind(
    rule: Rule,
    placements: Placements,
    variants: Sequence[Variant],
    made: dict[tuple[object, ...], Work | None],
) -> Kind:
    """The work by a rule, each once; ``made`` is what other schemes had made already."""
    values, which = placements.distinct("variant", *rule.fields)
    works = []
    for value in values:
        key = (id(rule), value)
        if key not in made:
            variant, *fields = value
            made[key] = rule(variants[variant].workload, fields)
        works.append(made[key])
    return Kind(works, [variant for variant, *_ in values], which)


def _efficiency(placements: Placements, variants: Sequence[Variant]) -> Array:
    """Relative sample efficiency; minibatches that are given cost none."""
    values, which = placements.distinct("variant", "max_policy_lag", "minibatch_rows")
    found = [
        lag_efficiency(lag) * (minibatch_efficiency(rows) if is_free else 1.0)
        for v, lag, rows in values
        for is_free in [variants[v].workload.hyperparameters.minibatch_rows is None]
    ]
    fractions: Array = np.array(found)[which]
    return fractions


def _on_arrays(
    factor: Callable[[str, int, int], float],
) -> Callable[[str, NDArray[np.int_], NDArray[np.int_]], Array]:
    """A function of a stage, its threads and busy cores, looked up once per pair of the latter."""
    known = functools.lru_cache(maxsize=None)(factor)

    def factors(stage: str, threads: NDArray[np.int_], busy: NDArray[np.int_]) -> Array:
        busy = np.maximum(busy, 0)
        most = int(busy.max()) + 1
        code = threads * most + busy
        occurs = np.zeros(int(code.max()) + 1, dtype=np.bool_)
        occurs[code] = True
        table: Array = np.ones(len(occurs))
        for index in np.flatnonzero(occurs):
            table[index] = known(stage, int(index) // most, int(index) % most)
        found: Array = table[code]
        return found

    return factors


def _spread_fraction(measured: Measurement, num_envs: int) -> float:
    """Standard deviation over mean of one vector step of so many environments, from its samples.

    A sample is the mean of so many steps, and a vector step the sum of so many environments':
    where all vary independently, the fraction goes by one over the root of either.
    """
    steps = measured.calls_per_sample * measured.task.num_envs / num_envs
    return measured.spread_fraction * math.sqrt(steps)
