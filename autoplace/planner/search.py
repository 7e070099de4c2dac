"""Which placement is fastest: enumerate, reject, cost, rank.

No clock, no files, no device: the same calibration and workload give the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

from threadpoolctl import threadpool_limits

from autoplace.cost_model import Z90, CostModel, fit_cost_model
from autoplace.engines import EAGER, ENGINES, TIMED_WHERE_NAMED, supports
from autoplace.errors import CalibrationError, UsageError
from autoplace.measurement import PROCESS_START, Calibration, Measurement, Task
from autoplace.planner import schemes as layouts
from autoplace.planner.choices import (
    OWN_DYNAMICS,
    calibrated_device,
    minibatch_choices,
    narrowed,
    policy_lags,
    sampler_counts,
    transfer_intervals,
)
from autoplace.planner.flips import Change, Choice, few_placements, find_flips
from autoplace.planner.memory import Limits
from autoplace.planner.plan import Candidate, Flip, Plan, Stage
from autoplace.planner.ranking import Ranking
from autoplace.planner.reasons import (
    assumes,
    changes_learning,
    missing_schemes,
    nothing_left,
    reasons,
)
from autoplace.planner.schemes import Axes, Scheme, Work
from autoplace.planner.space import (
    Costed,
    Coster,
    Rejected,
    Variant,
    envs_in_turn,
    task_calls,
)
from autoplace.workload import NetworkSpec, Workload

# Rivals of a choice have at least this share of its score, whatever their error.
_RIVAL_SHARE = 0.8
_CONTENDERS = 32  # that are looked at
_RIVALS = 3  # that are left, with the choice
# Two runs of the very same placement differ by about this much.
SAME_ITERATION_FRACTION = 0.02
# By how much predictions of two schemes err apart, beyond what their tasks do: how work on several
# lanes gets in each other's way. Of 23 workloads on two cores (tests/benchmarks/regret.py) the
# logarithms of measured over predicted time differed between schemes by 0.04 to 0.08 (from the
# median absolute deviation).
SCHEME_ERROR = 0.05
# Share of a stage from which on a task has a say in where its time is said to come from.
_GOOD_PART = 0.2
_SOURCES = ("measured", "given", "interpolated", "modelled", "extrapolated")  # the surest first


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
    search = Search(calibration, model, schemes, max_policy_lag, limits, given, total_steps)
    with threadpool_limits(limits=1, user_api="blas"):  # in small products threads only hinder
        return search.plan(workload, scheme)


class Search:
    """One calibration's candidates for any workload; the arguments are those of :func:`make_plan`.

    Attributes:
        coster: costs them, and keeps the costs of tasks.
    """

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
        self._schemes = [s for s in schemes if s.policy_lag <= max_policy_lag]
        self._all_schemes = schemes
        self._max_policy_lag = max_policy_lag
        self._given = given
        self._total_steps = total_steps
        self.coster = Coster(calibration, model, limits, given)
        self._costs = self.coster.costs
        steps = [m.task for m in calibration.measurements if m.task.op == "env_step"]
        self._env_steps = [
            t for t in steps if t.backend not in OWN_DYNAMICS - {given.get("env_backend")}
        ]
        timed = {
            m.task.threads
            for m in calibration.measurements
            if m.task.device == "cpu" and m.task.op in ("policy_step", "update")
        } or {m.task.threads for m in calibration.measurements if m.task.op == "matmul"}
        usable_cpus = calibration.machine.usable_cpus
        self._threads = tuple(sorted(t for t in timed if t <= usable_cpus)) or (1,)
        self._updates = [m.task for m in calibration.measurements if m.task.op == "update"]
        unusable = {a.device for a in calibration.machine.accelerators if not a.usable}
        self._accelerators = tuple(
            device for device in model.devices if device != "cpu" and device not in unusable
        )

    def plan(self, workload: Workload, scheme: str) -> Plan:
        """The best placement, and why; ``scheme`` is what the user asked for."""
        calibration, model = self._calibration, self._model
        ranking, refused = self.rank(workload)
        rejected = [candidate for each in refused for candidate in _rejected(each)]
        if not len(ranking):
            raise UsageError(nothing_left(rejected, scheme, self._given, model.devices))
        best, runner_up = ranking.best, ranking.runner_up
        margin, is_close = 0.0, False
        if runner_up is not None:
            # Below 0 where the safer of two equally fast placements was preferred.
            margin = max(best.score / runner_up.score - 1, 0.0)
            is_close = self.is_tie(best, runner_up)
        names = ranking.schemes
        rejected += missing_schemes(
            self._all_schemes,
            names,
            rejected,
            workload,
            model.devices,
            self._max_policy_lag,
            calibration.machine.usable_cpus,
        )
        flips = self.flips(workload, best) if len(names) > 1 else ()
        chosen = self.candidate(best)
        bottleneck = chosen.bottleneck
        runner = self.candidate(runner_up) if runner_up is not None else None
        return Plan(
            workload=workload,
            fingerprint=calibration.machine.fingerprint,
            chosen=chosen,
            candidates=_Candidates(
                len(ranking),
                # Of all others it would take longer than costing them did.
                lambda place: self.candidate(ranking[place], with_stages=place < len(names)),
                rejected,
            ),
            runner_up=runner,
            margin_fraction=margin,
            is_close=is_close,
            bottleneck=bottleneck,
            flips=flips,
            changes_learning=changes_learning(best.scheme, workload, best.placement),
            reasons=reasons(chosen, runner, margin, is_close, bottleneck, rejected, model.devices),
            assumes=assumes(self._timed_steps(best)),
            origin=calibration.origin,
            rivals=tuple(self.candidate(each) for each in self._rivals(ranking)),
        )

    def _timed_steps(self, costed: Costed) -> Measurement:
        """The timing that is nearest to the vector steps of a placement."""
        parts = (task for work in costed.works for task, _ in work.parts)
        return self._model.like_env_step(next(t for t in parts if t.op == "env_step"))

    def rank(self, workload: Workload) -> tuple[Ranking, list[Rejected]]:
        """Every legal placement, best first, and those that may not run."""
        variant = Variant(workload, self.axes(workload), self._total_steps)
        spaces, rejected = self.coster.cost(self._schemes, [variant])
        return Ranking(spaces), rejected

    def axes(self, workload: Workload, *, network: NetworkSpec | None = None) -> Axes:
        """The values that each part of a placement may take.

        ``network`` is whose engines are candidates, where it is not that of ``workload``.
        """
        hyper, usable_cpus = workload.hyperparameters, self._calibration.machine.usable_cpus
        backends = tuple(
            sorted(
                {
                    (task.backend or "", task.workers)
                    for task in self._env_steps
                    if task.env == workload.env and task.workers <= hyper.num_envs
                }
            )
        )
        if not backends:
            raise CalibrationError(
                f"no step time of {workload.env.id} is in the calibration: "
                f"run `autoplace calibrate --env {workload.env.id}`"
            )
        axes = Axes(
            accelerators=self._accelerators,
            sample_threads=self._threads,
            learn_threads=self._threads,
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
        like = {task.engine for task in self._updates if _family(task) == network.family}
        same = {task.engine for task in self._updates if task.network == network}
        return tuple(
            engine
            for engine in ENGINES
            if engine in (same if engine in TIMED_WHERE_NAMED else like)
            and supports(engine, is_plain=network.is_plain)
        ) or (EAGER,)

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
        stretch = math.exp(Z90 * self._error_s(task_calls(works)) / costed_s)
        return seconds / stretch, seconds * stretch

    def is_tie(self, first: Costed, second: Costed) -> bool:
        """Whether the model cannot tell two placements apart at 90 %.

        What both do alike errs alike and cancels; only the difference in calls counts.
        """
        width = math.hypot(Z90 * self._difference_error(first, second), SAME_ITERATION_FRACTION)
        return abs(math.log(first.score / second.score)) < width

    def _difference_error(self, first: Costed, second: Costed) -> float:
        """Standard error of the logarithm of the ratio of two scores."""
        shares: dict[Task, float] = {}
        for costed, sign in ((first, 1.0), (second, -1.0)):
            for task, calls in costed.rates.items():
                shares[task] = shares.get(task, 0.0) + sign * calls
        error = self._error_s(shares)
        return error if first.scheme.name == second.scheme.name else math.hypot(error, SCHEME_ERROR)

    def _rivals(self, ranking: Ranking) -> list[Costed]:
        """The choice and those that may well be faster, at most three; none if it is clear.

        Each is the one that may be the furthest ahead of all before it.
        """
        choice = ranking.best
        found = [choice]
        left = [c for c in ranking.contenders(_RIVAL_SHARE, _CONTENDERS) if self.is_tie(choice, c)]

        def lead(costed: Costed) -> float:
            """Over the best of those found, at the upper end of its 90 % interval."""
            return min(
                math.log(costed.score / other.score) + Z90 * self._difference_error(costed, other)
                for other in found
            )

        while left and len(found) < _RIVALS:
            best = max(left, key=lead)
            if lead(best) <= 0:
                break
            found.append(best)
            left.remove(best)
        return found if len(found) > 1 else []

    def flips(self, workload: Workload, best: Costed) -> tuple[Flip, ...]:
        """What would change the choice."""
        placement = best.placement

        def winners(changes: Sequence[Change]) -> list[Choice | None]:
            variants = [
                Variant(
                    workload=change.workload,
                    axes=few_placements(
                        self.axes(change.workload, network=workload.network), placement
                    ),
                    total_steps=change.total_steps,
                    env_extra_s=change.env_extra_s,
                )
                for change in changes
            ]
            spaces, _ = self.coster.cost(self._schemes, variants)
            rankings = (Ranking(spaces, index) for index in range(len(variants)))
            return [_choice(each.best) if len(each) else None for each in rankings]

        return find_flips(
            workload,
            _choice(best),
            placement,
            self._env_step_s(workload),
            winners,
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
        return min(costs[task].seconds / envs_in_turn(task) for task in tasks)

    def candidate(self, costed: Costed, *, with_stages: bool = True) -> Candidate:
        """The candidate as plan data, with each stage's interval where they are asked for."""
        space, row = costed
        works = costed.works
        iteration_s = costed.iteration_s
        low_s, high_s = self._interval_s(works, iteration_s, iteration_s)
        return Candidate(
            scheme=costed.scheme.name,
            placement=costed.placement,
            iteration_s=iteration_s,
            low_s=low_s,
            high_s=high_s,
            env_steps_per_s=float(space.env_steps_per_s[row]),
            sample_efficiency=float(space.efficiency[row]),
            one_off_s=float(space.one_off_s[row]),
            total_steps=self._total_steps,
            stages=tuple(self._stages(costed, works)) if with_stages else (),
        )

    def _stages(self, costed: Costed, works: Sequence[Work]) -> Iterator[Stage]:
        """What is done, and the waits that follow from what the other lanes do."""
        space, row = costed
        by_key = {work.key: work for work in works}
        for span in space.spans:
            key = span.name, span.lane
            start_s, total_s = float(span.start_s[row]), float(span.total_s[row])
            low_s = high_s = total_s
            calls, source = 1, "derived"
            if span.name != "wait":
                if key not in by_key:
                    continue
                work = by_key[key]
                low_s, high_s = self._interval_s([work], float(space.seconds[key][row]), total_s)
                calls = work.calls
                source = self._source(work)
            elif total_s <= 0:
                continue
            yield Stage(
                name=span.name,
                lane=span.lane,
                start_s=start_s,
                calls=calls,
                total_s=total_s,
                low_s=low_s,
                high_s=high_s,
                source=source,
            )

    def _source(self, work: Work) -> str:
        """The least certain source of the tasks that are a good part of the stage."""
        seconds = {task: times * self._costs[task].seconds for task, times in work.parts}
        least_s = _GOOD_PART * sum(seconds.values())
        sources = {self._costs[task].source for task, s in seconds.items() if s >= least_s}
        return max(sources, key=_SOURCES.index)


class _Candidates(Sequence[Candidate]):
    """Costed candidates, each made when it is first asked for, and behind them rejected ones."""

    def __init__(
        self, count: int, make: Callable[[int], Candidate], rejected: Sequence[Candidate]
    ) -> None:
        self._found: list[Candidate | None] = [*([None] * count), *rejected]
        self._make = make

    def __len__(self) -> int:
        return len(self._found)

    @overload
    def __getitem__(self, place: int) -> Candidate: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Candidate, ...]: ...

    def __getitem__(self, place: int | slice) -> Candidate | tuple[Candidate, ...]:
        if isinstance(place, slice):
            return tuple(self[index] for index in range(*place.indices(len(self))))
        found = self._found[place]
        if found is None:
            found = self._found[place] = self._make(place % len(self))
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[type[tuple[Candidate, ...]], tuple[list[Candidate]]]:
        return tuple, (list(self),)


def _rejected(refused: Rejected) -> Iterator[Candidate]:
    for row, reason in enumerate(refused.reasons):
        yield Candidate(
            scheme=refused.scheme.name,
            placement=refused.placements.placement(row),
            rejected_because=reason,
        )


def _choice(costed: Costed) -> Choice:
    return Choice(costed.scheme.name, costed.placement.learn_device)


def _family(task: Task) -> str | None:
    return None if task.network is None else task.network.family
