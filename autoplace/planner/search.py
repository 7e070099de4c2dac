"""Which placement is fastest: enumerate, reject, cost, rank, and find what would flip the choice.

No clock, no files, no device: the same calibration and workload give the same plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoplace.cost_model import Z90, Cost, CostModel, fit_cost_model
from autoplace.device_names import canonical_device
from autoplace.errors import CalibrationFault, UsageError
from autoplace.measurement import Calibration, Task
from autoplace.planner.memory import Limits, too_large
from autoplace.planner.plan import Candidate, Flip, Placement, Plan, Stage
from autoplace.planner.schemes import SCHEMES, Axes, Key, Scheme, Span, Work
from autoplace.units import format_percent, format_rate
from autoplace.workload import Workload

# Rows of a minibatch that the planner may choose, each with the share of env steps it needs
# compared to the best: 1 where learning is no slower.
MINIBATCH_EFFICIENCY: dict[int, float] = {64: 1.0, 128: 1.0, 256: 0.8, 512: 0.5}
# Two minibatches closer than this are equally fast, and the smaller one learns more safely.
SAME_SPEED_FRACTION = 0.03
# Two runs of the very same placement differ by about this much.
SAME_ITERATION_FRACTION = 0.02
# Chunk lengths that are considered.
_MAX_INTERVALS = 8
# The widest change of a parameter that is searched for a flip.
FLIP_REACH = 64.0


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

    @property
    def score(self) -> float:
        return self.env_steps_per_s * self.efficiency


def make_plan(
    calibration: Calibration,
    workload: Workload,
    *,
    scheme: str = "auto",
    max_policy_lag: int = 1,
    limits: Limits | None = None,
    placement: Mapping[str, object] | None = None,
    model: CostModel | None = None,
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

    Raises:
        UsageError: an unknown scheme, or given values that no legal placement has.
        CalibrationFault: something that the plan needs was never measured.
    """
    names = [entry.name for entry in SCHEMES]
    if scheme != "auto" and scheme not in names:
        raise UsageError(f"--scheme is auto or one of {', '.join(names)}, got {scheme!r}: name one")
    model = model if model is not None else fit_cost_model(calibration)
    given = {name: value for name, value in (placement or {}).items() if value is not None}
    if "device" in given:
        given["device"] = _calibrated_device(str(given["device"]), model.devices)
    schemes = [entry for entry in SCHEMES if scheme in ("auto", entry.name)]
    search = _Search(calibration, model, schemes, max_policy_lag, limits, given)
    costed, rejected = search.rank(workload)
    if not costed:
        raise UsageError(_nothing_left(rejected, scheme, given, model.devices))
    best = costed[0]
    runner_up = _runner_up(costed)
    margin, is_close = 0.0, False
    if runner_up is not None:
        margin = best.score / runner_up.score - 1
        is_close = search.is_tie(best, runner_up)
    shown = _best_per_scheme_first(costed)
    rejected.extend(_missing_schemes(schemes, costed, rejected, workload, model.devices))
    flips = search.flips(workload, best)
    chosen = search.candidate(best)
    stages = {stage.name: stage for stage in chosen.stages if stage.name != "wait"}
    bottleneck = max(stages.values(), key=lambda stage: stage.total_s).name
    runner = search.candidate(runner_up) if runner_up is not None else None
    return Plan(
        workload=workload,
        fingerprint=calibration.machine.fingerprint,
        chosen=chosen,
        candidates=(*(search.candidate(c) for c in shown), *rejected),
        runner_up=runner,
        margin_fraction=margin,
        is_close=is_close,
        bottleneck=bottleneck,
        flips=flips,
        changes_learning=_changes_learning(best.scheme, workload, best.placement),
        reasons=_reasons(chosen, runner, margin, is_close, bottleneck, rejected, model.devices),
        origin=calibration.origin,
    )


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
    ) -> None:
        self._calibration = calibration
        self._model = model
        self._schemes = schemes
        self._max_policy_lag = max_policy_lag
        self._limits = limits
        self._given = given
        self._costs: dict[Task, Cost] = {}

    def axes(self, workload: Workload) -> Axes:
        """The values that each part of a placement may take."""
        hyper = workload.hyperparameters
        timed = {
            m.task.threads
            for m in self._calibration.measurements
            if m.task.device == "cpu" and m.task.op in ("policy_step", "update")
        } or {m.task.threads for m in self._calibration.measurements if m.task.op == "matmul"}
        threads = tuple(sorted(t for t in timed if t <= self._calibration.machine.usable_cpus)) or (
            1,
        )
        backends = tuple(
            sorted(
                {
                    m.task.backend or ""
                    for m in self._calibration.measurements
                    if m.task.op == "env_step" and m.task.env == workload.env
                }
            )
        )
        if not backends:
            raise CalibrationFault(
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
        )
        return _narrowed(axes, self._given, hyper.rollout_steps)

    def rank(self, workload: Workload) -> tuple[list[_Costed], list[Candidate]]:
        """Every legal placement, best first, and those rejected with the reason."""
        axes = self.axes(workload)
        hyper = workload.hyperparameters
        pending: list[tuple[Scheme, Placement, tuple[Work, ...]]] = []
        rejected: list[Candidate] = []
        for scheme in self._schemes:
            if scheme.policy_lag > self._max_policy_lag:
                continue
            for placement in scheme.placements(axes, hyper.num_envs, hyper.rollout_steps):
                if not _matches(placement, self._given):
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
        self._costs.update(self._model.predict(missing))
        costed = [self._cost(workload, *entry) for entry in pending]
        costed.sort(key=lambda c: (-c.score, c.placement.minibatch_rows, c.scheme.name))
        return _smaller_minibatch_first(costed), rejected

    def _cost(
        self, workload: Workload, scheme: Scheme, placement: Placement, works: tuple[Work, ...]
    ) -> _Costed:
        steps = workload.hyperparameters.rollout_steps
        seconds = {
            work.key: sum(calls * self._costs[task].seconds for task, calls in work.parts)
            for work in works
        }
        spans = scheme.layout(seconds, placement, steps)
        iteration_s = sum(span.total_s for span in spans if span.lane == "sampler")
        free = workload.hyperparameters.minibatch_rows is None
        return _Costed(
            scheme=scheme,
            placement=placement,
            works=works,
            seconds=seconds,
            spans=spans,
            iteration_s=iteration_s,
            env_steps_per_s=steps * placement.num_envs / iteration_s,
            efficiency=minibatch_efficiency(placement.minibatch_rows) if free else 1.0,
        )

    def _error_s(self, shares: Mapping[Task, float]) -> float:
        """Standard error of several calls together.

        Tasks err independently, all calls of one task err alike.
        """
        return math.sqrt(
            sum((n * self._costs[task].standard_error_s) ** 2 for task, n in shares.items())
        )

    def _interval_s(self, works: Sequence[Work], seconds: float) -> tuple[float, float]:
        """The 90 % interval of works that take ``seconds`` together."""
        if seconds <= 0:
            return seconds, seconds
        stretch = math.exp(Z90 * self._error_s(_shares(works)) / seconds)
        return seconds / stretch, seconds * stretch

    def is_tie(self, first: _Costed, second: _Costed) -> bool:
        """Whether the model cannot tell two placements apart at 90 %.

        What both do alike errs alike and cancels; only the difference in calls counts.
        """
        shares = _shares(first.works)
        for task, calls in _shares(second.works).items():
            shares[task] = shares.get(task, 0.0) - calls
        width_s = math.hypot(
            Z90 * self._error_s(shares), SAME_ITERATION_FRACTION * first.iteration_s
        )
        return abs(second.iteration_s - first.iteration_s) < width_s

    def candidate(self, costed: _Costed) -> Candidate:
        """The candidate as plan data, with each stage's interval."""
        works = {work.key: work for work in costed.works}
        stages = []
        for span in costed.spans:
            work = works.get((span.name, span.lane))
            if work is None:  # a wait follows from the other lanes
                low_s = high_s = span.total_s
                calls, source = 1, "derived"
            else:
                low_s, high_s = self._interval_s([work], span.total_s)
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
        low_s, high_s = self._interval_s(costed.works, costed.iteration_s)
        return Candidate(
            scheme=costed.scheme.name,
            placement=costed.placement,
            iteration_s=costed.iteration_s,
            low_s=low_s,
            high_s=high_s,
            env_steps_per_s=costed.env_steps_per_s,
            sample_efficiency=costed.efficiency,
            stages=tuple(stages),
        )

    def flips(self, workload: Workload, best: _Costed) -> tuple[Flip, ...]:
        """The nearest change of each parameter, alone, at which another scheme is the fastest."""
        if len({scheme.name for scheme in self._schemes}) < 2 or len(self._model.devices) < 2:
            return ()
        found = []
        for parameter, start, change in _flip_parameters(workload, best.placement):
            flip = self._flip(parameter, start, change, best)
            if flip is not None:
                found.append(flip)
        return tuple(found)

    def _flip(
        self,
        parameter: str,
        start: float,
        change: Callable[[float], Workload | None],
        best: _Costed,
    ) -> Flip | None:
        def winner(value: float) -> str | None:
            changed = change(value)
            if changed is None:
                return None
            costed, _ = self.rank(changed)
            return costed[0].scheme.name if costed else None

        for direction in (2.0, 0.5):
            near, factor = start, direction
            while max(factor, 1 / factor) <= FLIP_REACH:
                value = start * factor
                name = winner(value)
                if name is None:
                    break
                if name != best.scheme.name:
                    return self._bisect(parameter, start, near, value, name, winner, best)
                near, factor = value, factor * direction
        return None

    @staticmethod
    def _bisect(
        parameter: str,
        start: float,
        near: float,
        far: float,
        name: str,
        winner: Callable[[float], str | None],
        best: _Costed,
    ) -> Flip:
        for _ in range(5):
            middle = math.sqrt(near * far)
            found = winner(middle)
            if found is None or found == best.scheme.name:
                near = middle
            else:
                far, name = middle, found
        return Flip(
            parameter=parameter,
            from_value=start,
            to_value=float(round(far)),
            scheme_from=best.scheme.name,
            scheme_to=name,
        )


# --------------------------------------------------------------------------------------------------
# Choices


def _calibrated_device(name: str, devices: Sequence[str]) -> str:
    device = canonical_device(name, devices[1:])
    if device not in devices:
        raise UsageError(
            f"--device is one that was calibrated ({', '.join(devices)}), got {name}: "
            "name one of them, or run `autoplace calibrate` again"
        )
    return device


def minibatch_choices(rollout_rows: int, given: int | None) -> tuple[int, ...]:
    """Minibatch sizes to consider: the user's, or the declared ones that divide the rollout.

    Where none of the declared sizes divides the rollout, the divisor nearest to one of them; a
    rollout that is smaller than all of them is one minibatch.
    """
    if given is not None:
        return (given,)
    declared = [rows for rows in MINIBATCH_EFFICIENCY if rollout_rows % rows == 0]
    if declared:
        return tuple(declared)
    divisors = [rows for rows in range(2, rollout_rows + 1) if rollout_rows % rows == 0]
    target = min(MINIBATCH_EFFICIENCY)
    return (min(divisors, key=lambda rows: (abs(math.log(rows / target)), rows)),)


def minibatch_efficiency(rows: int) -> float:
    """Relative sample efficiency, interpolated over log rows between the declared sizes."""
    sizes = sorted(MINIBATCH_EFFICIENCY)
    if rows <= sizes[0]:
        return MINIBATCH_EFFICIENCY[sizes[0]]
    for low, high in itertools.pairwise(sizes):
        if rows <= high:
            share = math.log(rows / low) / math.log(high / low)
            first, last = MINIBATCH_EFFICIENCY[low], MINIBATCH_EFFICIENCY[high]
            return first + share * (last - first)
    return MINIBATCH_EFFICIENCY[sizes[-1]]


def transfer_intervals(rollout_steps: int) -> tuple[int, ...]:
    """Chunk lengths to consider: the whole rollout, and halves of it down to a few steps."""
    lengths = [rollout_steps]
    while lengths[-1] > 1 and len(lengths) < _MAX_INTERVALS:
        lengths.append(math.ceil(lengths[-1] / 2))
    return tuple(lengths)


def _narrowed(axes: Axes, given: Mapping[str, object], steps: int) -> Axes:
    """The axes with what the user gave in place of the free values."""

    def one(name: str, free: tuple[int, ...]) -> tuple[int, ...]:
        value = given.get(name)
        return free if value is None else (int(str(value)),)

    interval = given.get("transfer_interval_steps")
    if interval is not None and not 1 <= int(str(interval)) <= steps:
        raise UsageError(
            f"--transfer-interval is between 1 and the rollout's {steps} steps, got {interval}: "
            "change it"
        )
    for name, flag in (
        ("sample_threads", "--sample-threads"),
        ("learn_threads", "--learn-threads"),
    ):
        value = given.get(name)
        if value is not None and int(str(value)) < 1:
            raise UsageError(f"{flag} is a whole number from 1, got {value}: change it")
    backend = given.get("env_backend")
    if backend is not None and backend not in axes.env_backends:
        raise UsageError(
            f"--env-backend is auto or one of {', '.join(axes.env_backends)}, got {backend}: "
            "name one"
        )
    return Axes(
        accelerators=axes.accelerators,
        sample_threads=one("sample_threads", axes.sample_threads),
        learn_threads=one("learn_threads", axes.learn_threads),
        minibatch_rows=axes.minibatch_rows,
        transfer_intervals=one("transfer_interval_steps", axes.transfer_intervals),
        env_backends=axes.env_backends if backend is None else (str(backend),),
        engines=axes.engines,
    )


def _matches(placement: Placement, given: Mapping[str, object]) -> bool:
    """Whether the placement has what the user gave; parts that do not apply to it do not count."""
    for name, value in given.items():
        if name == "transfer_interval_steps" and placement.sample_device == placement.learn_device:
            continue
        if name == "learn_threads" and placement.learn_device != "cpu":
            continue
        if name == "sample_threads" and placement.sample_device != "cpu":
            continue
        if getattr(placement, name) != value:
            return False
    return True


def _smaller_minibatch_first(costed: list[_Costed]) -> list[_Costed]:
    """Move the smallest minibatch within 3 % of the best score to the front."""
    if not costed:
        return costed
    best = costed[0]
    close = [
        c
        for c in costed
        if c.score >= best.score * (1 - SAME_SPEED_FRACTION)
        and c.placement.minibatch_rows < best.placement.minibatch_rows
    ]
    if not close:
        return costed
    chosen = min(close, key=lambda c: (c.placement.minibatch_rows, -c.score))
    return [chosen, *(c for c in costed if c is not chosen)]


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


def _flip_parameters(
    workload: Workload, placement: Placement
) -> Iterator[tuple[str, float, Callable[[float], Workload | None]]]:
    """(name, present value, the workload with another value) of what a flip is searched in."""
    hyper = workload.hyperparameters
    rows = hyper.rollout_rows

    if workload.network.hidden_sizes:

        def hidden(value: float) -> Workload:
            factor = value / max(workload.network.hidden_sizes)
            sizes = tuple(max(1, round(w * factor)) for w in workload.network.hidden_sizes)
            return workload.replace(hidden_sizes=sizes)

        yield "hidden_sizes", float(max(workload.network.hidden_sizes)), hidden

    def minibatch(value: float) -> Workload | None:
        size = round(value)
        return workload.replace(minibatch_rows=size) if 2 <= size <= rows else None

    yield "minibatch_rows", float(placement.minibatch_rows), minibatch

    def num_envs(value: float) -> Workload | None:
        count = round(value)
        if count < 1 or count * hyper.rollout_steps < max(2, hyper.minibatch_rows or 2):
            return None
        return workload.replace(num_envs=count)

    yield "num_envs", float(hyper.num_envs), num_envs


def _shares(works: Sequence[Work]) -> dict[Task, float]:
    """How often each task runs in an iteration."""
    shares: dict[Task, float] = {}
    for work in works:
        for task, calls in work.parts:
            shares[task] = shares.get(task, 0.0) + calls
    return shares


def _least_certain(sources: Iterator[str]) -> str:
    order = ("measured", "interpolated", "extrapolated")
    return max(sources, key=order.index)


# --------------------------------------------------------------------------------------------------
# Reasons


def _changes_learning(scheme: Scheme, workload: Workload, placement: Placement) -> tuple[str, ...]:
    changes = []
    if scheme.policy_lag:
        changes.append(
            f"{scheme.name} samples with a policy that is {scheme.policy_lag} iteration(s) old"
        )
    if placement.num_envs != workload.hyperparameters.num_envs:
        changes.append(
            f"num_envs {placement.num_envs} instead of {workload.hyperparameters.num_envs}"
        )
    return tuple(changes)


def _missing_schemes(
    schemes: Sequence[Scheme],
    costed: Sequence[_Costed],
    rejected: Sequence[Candidate],
    workload: Workload,
    devices: Sequence[str],
) -> list[Candidate]:
    """A rejected candidate for each scheme that had no placement at all, with the reason."""
    seen = {c.scheme.name for c in costed} | {c.scheme for c in rejected}
    hyper = workload.hyperparameters
    reason = (
        "no accelerator was calibrated on this machine"
        if len(devices) < 2
        else "no placement has the values that were given"
    )
    return [
        Candidate(
            scheme=scheme.name,
            placement=Placement(
                device="cpu",
                sample_device="cpu",
                learn_device="cpu",
                transfer_interval_steps=hyper.rollout_steps,
                minibatch_rows=hyper.minibatch_rows or min(MINIBATCH_EFFICIENCY),
                num_envs=hyper.num_envs,
            ),
            rejected_because=reason,
        )
        for scheme in schemes
        if scheme.name not in seen
    ]


def _nothing_left(
    rejected: Sequence[Candidate],
    scheme: str,
    given: Mapping[str, object],
    devices: Sequence[str],
) -> str:
    if rejected:
        first = rejected[0]
        return (
            f"no placement fits: {first.scheme} {first.rejected_because}: "
            "use fewer or smaller rollouts (--num-envs, --rollout-steps)"
        )
    if scheme in ("hybrid", "gpu") and len(devices) < 2:
        return (
            f"--scheme {scheme} needs an accelerator with timings, and only {devices[0]} has any: "
            "use --scheme cpu, or run `autoplace calibrate` where there is one"
        )
    values = ", ".join(f"{name}={value}" for name, value in given.items())
    return (
        f"no placement has all of {values or 'the given values'} (scheme {scheme}, devices "
        f"{', '.join(devices)}): leave one of them to auto"
    )


def _reasons(
    chosen: Candidate,
    runner_up: Candidate | None,
    margin: float,
    is_close: bool,
    bottleneck: str,
    rejected: Sequence[Candidate],
    devices: Sequence[str],
) -> tuple[str, ...]:
    busy_s = next(s.total_s for s in chosen.stages if s.name == bottleneck)
    reasons = [
        f"{chosen.scheme} is predicted to run {format_rate(chosen.env_steps_per_s)} env steps/s",
        f"{bottleneck} takes {format_percent(busy_s / chosen.iteration_s)} of an iteration",
    ]
    if runner_up is not None:
        other = (
            f"{runner_up.scheme} on {runner_up.placement.device}"
            if runner_up.scheme != chosen.scheme
            else "the next placement of the same scheme"
        )
        verdict = "a tie within the model's error" if is_close else "beyond the model's error"
        reasons.append(f"{format_percent(margin)} ahead of {other}, {verdict}")
    if len(devices) < 2:
        reasons.append("only the CPU has timings, so only its thread counts and sizes were free")
    reasons.extend(
        f"{candidate.scheme} was left out: {candidate.rejected_because}"
        for candidate in rejected[:3]
    )
    return tuple(reasons)
