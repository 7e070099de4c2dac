"""Which placement is fastest: enumerate, reject, cost, rank.

No clock, no files, no device: the same calibration and workload give the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from threadpoolctl import threadpool_limits

from autoplace.contention import Contention
from autoplace.cost_model import Z90, Cost, CostModel, fit_cost_model
from autoplace.engines import EAGER, ENGINES, TIMED_WHERE_NAMED, supports
from autoplace.errors import CalibrationError, UsageError
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.planner import schemes as layouts
from autoplace.planner.choices import (
    OWN_DYNAMICS,
    calibrated_device,
    lag_efficiency,
    matches,
    minibatch_choices,
    minibatch_efficiency,
    narrowed,
    policy_lags,
    sampler_counts,
    transfer_intervals,
)
from autoplace.planner.engine_gain import setup_s
from autoplace.planner.flips import Change, Choice, few_placements, find_flips
from autoplace.planner.memory import Limits, too_large
from autoplace.planner.plan import Candidate, Flip, Placement, Plan, Stage, start_share
from autoplace.planner.reasons import changes_learning, missing_schemes, nothing_left, reasons
from autoplace.planner.schemes import Axes, Key, Scheme, Span, Timing, Work
from autoplace.workload import NetworkSpec, Workload

# Two placements closer than this are equally fast, and the safer one is taken.
SAME_SPEED_FRACTION = 0.03
# Two runs of the very same placement differ by about this much.
SAME_ITERATION_FRACTION = 0.02
# What is left at least of a vector step whose environments are thought faster.
_LEAST_SHARE = 0.02
PROCESS_START = Task(op="process_start")


@dataclass(frozen=True, slots=True)
class _Costed:
    """A placement with its work, and the standard error of each task's share."""

    scheme: Scheme
    placement: Placement
    works: tuple[Work, ...]
    seconds: dict[Key, float]
    spans: tuple[Span, ...]
    iteration_s: float
    env_steps_per_s: float
    efficiency: float
    start_turns: int  # one after the other, of processes that start
    one_off_s: float
    start_share: float  # of the iterations' time

    @property
    def score(self) -> float:
        return self.env_steps_per_s * self.efficiency / (1 + self.start_share)

    @property
    def shares(self) -> dict[Task, float]:
        """How often each task runs in a second of the whole run."""
        shares = _shares(self.works)
        if self.start_turns:
            turns_s = self.start_turns / self.one_off_s
            shares[PROCESS_START] = self.start_share * self.iteration_s * turns_s
        run_s = self.iteration_s * (1 + self.start_share)
        return {task: calls / run_s for task, calls in shares.items()}


def make_plan(
    calibration: Calibration,
    workload: Workload,
    *,
    scheme: str = "auto",
    max_policy_lag: int = 1,
    limits: Limits | None = None,
    placement: Mapping[str, object] | None = None,
    model: CostModel | None = None,
    total_steps: int | None = None,
) -> Plan:
    """The fastest legal placement of ``workload`` on the calibrated machine, and why.

    Args:
        calibration: what was measured; the environment's step time must be among it.
        workload: what is to be done.
        scheme: a scheme's name to plan within that scheme only, or ``auto``.
        max_policy_lag: iterations that the sampling policy may lag behind.
        limits: free memory; ``None`` leaves memory out of consideration.
        placement: parts of the placement that are given (names of :class:`Placement`); the rest is
            planned around them.
        model: the cost model, if it has been fitted already.
        total_steps: env steps that the run is to take, over which the start of its processes is
            charged; ``None`` charges none.

    Raises:
        UsageError: an unknown scheme, or given values that no legal placement has.
        CalibrationError: something that the plan needs was never measured.
    """
    known = [entry.name for entry in layouts.SCHEMES]
    if scheme != "auto" and scheme not in known:
        raise UsageError(f"--scheme is auto or one of {', '.join(known)}, got {scheme!r}: name one")
    model = model if model is not None else fit_cost_model(calibration)
    given = {name: value for name, value in (placement or {}).items() if value is not None}
    if "device" in given:
        given["device"] = calibrated_device(str(given["device"]), model.devices)
    schemes = [entry for entry in layouts.SCHEMES if scheme in ("auto", entry.name)]
    search = _Search(calibration, model, schemes, max_policy_lag, limits, given, total_steps)
    with threadpool_limits(limits=1, user_api="blas"):  # in small products threads only hinder
        return search.plan(workload, scheme)


class _Search:
    """One calibration's candidates for any workload; the costs of tasks are kept between calls."""

    def __init__(
        self,
        calibration: Calibration,
        model: CostModel,
        schemes: Sequence[Scheme],
        max_policy_lag: int,
        limits: Limits | None,
        given: Mapping[str, object],
        total_steps: int | None,
    ) -> None:
        self._calibration = calibration
        self._model = model
        self._schemes = schemes
        self._max_policy_lag = max_policy_lag
        self._limits = limits
        self._given = given
        self._total_steps = total_steps
        self._costs: dict[Task, Cost] = {}
        if PROCESS_START in calibration.by_task:
            self._costs = model.predict([PROCESS_START])
        self._contention = Contention(calibration)
        self._env_steps = [m for m in calibration.measurements if m.task.op == "env_step"]
        self._nearest: dict[Task, Measurement] = {}

    def plan(self, workload: Workload, scheme: str) -> Plan:
        """The best placement, and why; ``scheme`` is what the user asked for."""
        calibration, model = self._calibration, self._model
        costed, rejected = self.rank(workload)
        if not costed:
            raise UsageError(nothing_left(rejected, scheme, self._given, model.devices))
        best = costed[0]
        runner_up = _runner_up(costed)
        margin, is_close = 0.0, False
        if runner_up is not None:
            # Below 0 where the safer of two equally fast placements was preferred.
            margin = max(best.score / runner_up.score - 1, 0.0)
            is_close = self.is_tie(best, runner_up)
        shown = _best_per_scheme_first(costed)
        names = {c.scheme.name for c in costed}
        rejected.extend(
            missing_schemes(
                self._schemes,
                names,
                rejected,
                workload,
                model.devices,
                self._max_policy_lag,
                calibration.machine.usable_cpus,
            )
        )
        flips: tuple[Flip, ...] = ()
        if len(names) > 1:
            flips = self.flips(workload, best)
        chosen = self.candidate(best)
        bottleneck = chosen.bottleneck
        runner = self.candidate(runner_up) if runner_up is not None else None
        return Plan(
            workload=workload,
            fingerprint=calibration.machine.fingerprint,
            chosen=chosen,
            candidates=(
                # Of all others it would take longer than costing them did.
                *(self.candidate(c, with_stages=i < len(names)) for i, c in enumerate(shown)),
                *rejected,
            ),
            runner_up=runner,
            margin_fraction=margin,
            is_close=is_close,
            bottleneck=bottleneck,
            flips=flips,
            changes_learning=changes_learning(best.scheme, workload, best.placement),
            reasons=reasons(chosen, runner, margin, is_close, bottleneck, rejected, model.devices),
            origin=calibration.origin,
        )

    def axes(self, workload: Workload, *, network: NetworkSpec | None = None) -> Axes:
        """The values that each part of a placement may take.

        ``network`` is whose engines are candidates, where it is not that of ``workload``.
        """
        hyper, usable_cpus = workload.hyperparameters, self._calibration.machine.usable_cpus
        timed = {
            m.task.threads
            for m in self._calibration.measurements
            if m.task.device == "cpu" and m.task.op in ("policy_step", "update")
        } or {m.task.threads for m in self._calibration.measurements if m.task.op == "matmul"}
        threads = tuple(sorted(t for t in timed if t <= usable_cpus)) or (1,)
        backends = tuple(
            sorted(
                {
                    (m.task.backend or "", m.task.workers)
                    for m in self._env_steps
                    if m.task.env == workload.env
                    and m.task.workers <= hyper.num_envs
                    and m.task.backend not in OWN_DYNAMICS - {self._given.get("env_backend")}
                }
            )
        )
        if not backends:
            raise CalibrationError(
                f"no step time of {workload.env.id} is in the calibration: "
                f"run `autoplace calibrate --env {workload.env.id}`"
            )
        unusable = {a.device for a in self._calibration.machine.accelerators if not a.usable}
        axes = Axes(
            accelerators=tuple(d for d in self._model.devices if d != "cpu" and d not in unusable),
            sample_threads=threads,
            learn_threads=threads,
            minibatch_rows=minibatch_choices(hyper.rollout_rows, hyper.minibatch_rows),
            transfer_intervals=transfer_intervals(hyper.rollout_steps),
            env_backends=backends,
            samplers=tuple(
                (backend, count)
                for backend, workers in backends
                for count in sampler_counts(hyper.num_envs, usable_cpus)
                if not workers
            ),
            policy_lags=policy_lags(self._max_policy_lag),
            usable_cpus=usable_cpus,
            engines=self._engines(network or workload.network),
        )
        return narrowed(axes, self._given, hyper.rollout_steps)

    def _engines(self, network: NetworkSpec) -> tuple[str, ...]:
        """Those that can run the network and were timed with ones like it, or with itself."""
        steps = [m.task for m in self._calibration.measurements if m.task.op == "update"]
        like = {task.engine for task in steps if _family(task) == network.family}
        same = {task.engine for task in steps if task.network == network}
        return tuple(
            engine
            for engine in ENGINES
            if engine in (same if engine in TIMED_WHERE_NAMED else like)
            and supports(engine, is_plain=network.is_plain)
        ) or (EAGER,)

    def rank(
        self,
        workload: Workload,
        axes: Axes | None = None,
        *,
        env_extra_s: float = 0.0,
        total_steps: int | None = None,
    ) -> tuple[list[_Costed], list[Candidate]]:
        """Every legal placement, best first, and those rejected with the reason.

        Args:
            workload: what is to be done.
            axes: values to combine; all if not given.
            env_extra_s: by which each step of one environment takes longer than was measured.
            total_steps: of the run; that of the search if not given.
        """
        axes = axes if axes is not None else self.axes(workload)
        hyper = workload.hyperparameters
        pending: list[tuple[Scheme, Placement, tuple[Work, ...]]] = []
        rejected: list[Candidate] = []
        for scheme in self._schemes:
            if scheme.policy_lag > self._max_policy_lag:
                continue
            for placement in scheme.placements(axes, hyper.num_envs, hyper.rollout_steps):
                if not matches(placement, self._given):
                    continue
                reason = too_large(workload, placement, self._limits)
                if reason is not None:
                    rejected.append(
                        Candidate(scheme=scheme.name, placement=placement, rejected_because=reason)
                    )
                    continue
                pending.append((scheme, placement, scheme.work(workload, placement)))
        tasks = dict.fromkeys(
            task for _, _, works in pending for work in works for task, _ in work.parts
        )
        missing = [task for task in tasks if task not in self._costs]
        self._costs.update(self._model.predict(missing, within_run=True))
        total_steps = total_steps if total_steps is not None else self._total_steps
        costed = [self._cost(workload, *entry, env_extra_s, total_steps) for entry in pending]
        costed.sort(key=lambda c: (-c.score, c.placement.minibatch_rows, c.scheme.name))
        return _safest_of_equals_first(costed), rejected

    def _cost(
        self,
        workload: Workload,
        scheme: Scheme,
        placement: Placement,
        works: tuple[Work, ...],
        env_extra_s: float,
        total_steps: int | None,
    ) -> _Costed:
        steps = workload.hyperparameters.rollout_steps
        seconds = {
            work.key: sum(calls * self._seconds(task, env_extra_s) for task, calls in work.parts)
            for work in works
        }
        if placement.num_groups > 1:
            # One half steps while the other's actions are computed: the slower lane counts, and
            # the sampler sees of the steps only what it has to wait for.
            policy_s, step_s = (seconds[name, "sampler"] for name in ("policy_step", "env_step"))
            seconds["env_step", "sampler"] = max(step_s - policy_s, 0.0)
        env_step = next(task for work in works if work.name == "env_step" for task, _ in work.parts)
        nearest = self._nearest_env_step(env_step)
        timing = Timing(
            seconds=seconds,
            steps=steps,
            usable_cpus=self._calibration.machine.usable_cpus,
            slowdown=self._contention.factor,
            env_spread_fraction=_spread_fraction(nearest, env_step.num_envs),
        )
        spans = scheme.layout(timing, placement)
        iteration_s = sum(span.total_s for span in spans if span.lane == "sampler")
        efficiency = lag_efficiency(placement.max_policy_lag)
        if workload.hyperparameters.minibatch_rows is None:
            efficiency *= minibatch_efficiency(placement.minibatch_rows)
        rate = steps * placement.num_envs * nearest.valid_fraction / iteration_s
        processes = scheme.learner_processes + placement.num_workers
        turns = math.ceil(processes / self._calibration.machine.usable_cpus)
        started = self._costs.get(PROCESS_START)
        one_off_s = turns * started.seconds if started is not None else 0.0
        one_off_s += setup_s(self._calibration, placement, workload.network)
        return _Costed(
            scheme=scheme,
            placement=placement,
            works=works,
            seconds=seconds,
            spans=spans,
            iteration_s=iteration_s,
            env_steps_per_s=rate,
            efficiency=efficiency,
            start_turns=turns if started is not None else 0,
            one_off_s=one_off_s,
            start_share=start_share(rate, one_off_s, total_steps),
        )

    def _nearest_env_step(self, task: Task) -> Measurement:
        """The timing of the same environment and backend that is nearest in number."""
        if task not in self._nearest:
            self._nearest[task] = min(
                (m for m in self._env_steps if _same_but_number(m.task, task)),
                key=lambda m: abs(math.log(m.task.num_envs / task.num_envs)),
            )
        return self._nearest[task]

    def _seconds(self, task: Task, env_extra_s: float) -> float:
        seconds = self._costs[task].seconds
        if env_extra_s and task.op == "env_step":
            # What a message to a worker takes stays as it is.
            return max(seconds + env_extra_s * _envs_in_turn(task), _LEAST_SHARE * seconds)
        return seconds

    def _error_s(self, shares: Mapping[Task, float]) -> float:
        """Standard error of several calls (or shares of them) together.

        Tasks err independently, all calls of one task err alike.
        """
        return math.sqrt(
            sum((n * self._costs[task].standard_error_s) ** 2 for task, n in shares.items())
        )

    def _interval_s(
        self, works: Sequence[Work], costed_s: float, seconds: float
    ) -> tuple[float, float]:
        """The 90 % interval of what was costed at ``costed_s`` and takes ``seconds``."""
        if costed_s <= 0:
            return seconds, seconds
        stretch = math.exp(Z90 * self._error_s(_shares(works)) / costed_s)
        return seconds / stretch, seconds * stretch

    def is_tie(self, first: _Costed, second: _Costed) -> bool:
        """Whether the model cannot tell two placements apart at 90 %.

        What both do alike errs alike and cancels; only the difference in calls counts.
        """
        shares: dict[Task, float] = {}
        for costed, sign in ((first, 1.0), (second, -1.0)):
            for task, calls in costed.shares.items():
                shares[task] = shares.get(task, 0.0) + sign * calls
        width = math.hypot(Z90 * self._error_s(shares), SAME_ITERATION_FRACTION)
        return abs(math.log(first.score / second.score)) < width

    def flips(self, workload: Workload, best: _Costed) -> tuple[Flip, ...]:
        """What would change the choice."""

        def winner(change: Change) -> Choice | None:
            axes = few_placements(
                self.axes(change.workload, network=workload.network), best.placement
            )
            costed, _ = self.rank(
                change.workload,
                axes,
                env_extra_s=change.env_extra_s,
                total_steps=change.total_steps,
            )
            return _choice(costed[0]) if costed else None

        return find_flips(
            workload,
            _choice(best),
            best.placement,
            self._env_step_s(workload),
            winner,
            self._total_steps if PROCESS_START in self._costs else None,
        )

    def _env_step_s(self, workload: Workload) -> float:
        """Seconds of a step of one environment, where it is stepped fastest."""
        tasks = [
            Task(
                op="env_step",
                env=workload.env,
                backend=backend,
                num_envs=workload.hyperparameters.num_envs,
                workers=workers,
            )
            for backend, workers in self.axes(workload).env_backends
        ]
        costs = self._model.predict(tasks)
        return min(costs[task].seconds / _envs_in_turn(task) for task in tasks)

    def candidate(self, costed: _Costed, *, with_stages: bool = True) -> Candidate:
        """The candidate as plan data, with each stage's interval where they are asked for."""
        works = {work.key: work for work in costed.works}
        stages = []
        for span in costed.spans if with_stages else ():
            work = works.get((span.name, span.lane))
            if work is None:  # a wait follows from the other lanes
                low_s = high_s = span.total_s
                calls, source = 1, "derived"
            else:
                low_s, high_s = self._interval_s([work], costed.seconds[work.key], span.total_s)
                calls = work.calls
                source = _least_certain(self._costs[task].source for task, _ in work.parts)
            stages.append(
                Stage(
                    name=span.name,
                    lane=span.lane,
                    start_s=span.start_s,
                    calls=calls,
                    total_s=span.total_s,
                    low_s=low_s,
                    high_s=high_s,
                    source=source,
                )
            )
        low_s, high_s = self._interval_s(costed.works, costed.iteration_s, costed.iteration_s)
        return Candidate(
            scheme=costed.scheme.name,
            placement=costed.placement,
            iteration_s=costed.iteration_s,
            low_s=low_s,
            high_s=high_s,
            env_steps_per_s=costed.env_steps_per_s,
            sample_efficiency=costed.efficiency,
            one_off_s=costed.one_off_s,
            total_steps=self._total_steps,
            stages=tuple(stages),
        )


def _choice(costed: _Costed) -> Choice:
    return Choice(costed.scheme.name, costed.placement.learn_device)


def _envs_in_turn(task: Task) -> int:
    """Environments that one process steps one after the other."""
    return math.ceil(task.num_envs / max(1, task.workers))


# --------------------------------------------------------------------------------------------------
# Order


def _safest_of_equals_first(costed: list[_Costed]) -> list[_Costed]:
    """Of those within 3 % of the best score, move the safest to the front.

    A smaller minibatch learns more safely, fewer threads suffer less from other programs, a policy
    that samples is better not old, and fewer processes are simpler.
    """
    if not costed:
        return costed

    def risk(candidate: _Costed) -> tuple[float, ...]:
        placement = candidate.placement
        sampling = max(placement.sample_threads, placement.num_workers)
        threads = sampling + placement.learn_threads
        lag, workers = placement.max_policy_lag, placement.num_workers
        groups = placement.num_groups
        return placement.minibatch_rows, threads, lag, workers, groups, -candidate.score

    limit = costed[0].score * (1 - SAME_SPEED_FRACTION)
    chosen = min((c for c in costed if c.score >= limit), key=risk)
    return [chosen, *(c for c in costed if c is not chosen)]


def _family(task: Task) -> str | None:
    return None if task.network is None else task.network.family


def _runner_up(costed: Sequence[_Costed]) -> _Costed | None:
    """The best of another scheme; with one scheme only, the best other placement."""
    best = costed[0]
    others = [c for c in costed if c.scheme.name != best.scheme.name] or list(costed[1:])
    return others[0] if others else None


def _best_per_scheme_first(costed: Sequence[_Costed]) -> list[_Costed]:
    """The best candidate of each scheme, then all others, each in order of score."""
    first: dict[str, _Costed] = {}
    for candidate in costed:
        first.setdefault(candidate.scheme.name, candidate)
    leading = list(first.values())
    chosen = {id(candidate) for candidate in leading}
    return leading + [candidate for candidate in costed if id(candidate) not in chosen]


def _spread_fraction(measured: Measurement, num_envs: int) -> float:
    """Standard deviation over mean of one vector step of so many environments, from its samples.

    A sample is the mean of so many steps, and a vector step the sum of so many environments':
    where all vary independently, the fraction goes by one over the root of either.
    """
    steps = measured.calls_per_sample * measured.task.num_envs / num_envs
    return measured.spread_fraction * math.sqrt(steps)


def _same_but_number(first: Task, second: Task) -> bool:
    return (first.env, first.backend, first.workers) == (second.env, second.backend, second.workers)


def _shares(works: Sequence[Work]) -> dict[Task, float]:
    """How often each task runs in an iteration."""
    shares: dict[Task, float] = {}
    for work in works:
        for task, calls in work.parts:
            shares[task] = shares.get(task, 0.0) + calls
    return shares


def _least_certain(sources: Iterator[str]) -> str:
    order = ("measured", "given", "interpolated", "modelled", "extrapolated")
    return max(sources, key=order.index)
