"""Whether a run goes as its plan said, and what it may be where it does not.

After a warm-up, iterations are gathered into windows. In each, the median of every stage is
compared with its prediction: a stage is *off* where their ratio leaves the prediction's 90 %
interval, widened by the window's own noise, and the difference matters to the iteration. Causes are
told apart by evidence, the first that fits:

========================= ========================================================================
quota                     the group's counter says that the CPU quota held the program up
other programs            the CPUs worked for others meanwhile
slower device             a task of the calibration, timed anew at rest, takes longer than then
environment               of what the host does, stepping the environments alone is off
contention                sampling and learning overlap on the CPU, and are slow only together
========================= ========================================================================
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoplace.cost_model import Z90
from autoplace.device_names import CPU, is_accelerator
from autoplace.planner.observed import Observed
from autoplace.planner.plan import Plan, Stage
from autoplace.results import StageKey
from autoplace.train.callbacks import SAMPLER, Callback, IterationReport, RunStart
from autoplace.train.schemes import overlaps
from autoplace.train.witness import Evidence, Witness
from autoplace.units import format_percent, format_seconds, significant

WARM_UP_ITERATIONS = 2
WINDOW_ITERATIONS = 10
FIRST_WINDOW_S, LONGEST_WINDOW_S = 1.0, 60.0  # each window lasts twice as long as the one before
_MATTERS_FRACTION = 0.03  # of an iteration: a smaller difference changes no choice
_CHANGE_FRACTION = 0.5  # by which a ratio has moved where it is worth another line
# Timings of the same thing at different times differ by less than this on a quiet machine.
_SLOWDOWN_TOLERANCE = 0.1
_LOAD_CPUS = 0.2
_THROTTLED_FRACTION = 0.02
SWITCH_GAIN_FRACTION = 0.1  # of an iteration, below which predictions are too unsure to act on
_SAFETY = 2.0  # what a change must save, in multiples of its cost

_STEPS = {"policy_step": "policy step", "update": "gradient step"}  # as engines' verdicts name them


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """A stage that is off its prediction.

    Attributes:
        name: of the stage.
        lane: it runs on.
        predicted_s: seconds per iteration in the plan.
        measured_s: median seconds per iteration in the window.
        noise_fraction: standard error of that median, relative to it.
        kind: ``engine``, ``quota``, ``load``, ``environment``, ``slower``, ``faster``, ``relief``,
            ``contention`` or ``unknown``.
        cause: the same in words, with the evidence.
    """

    name: str
    lane: str
    predicted_s: float
    measured_s: float
    noise_fraction: float
    kind: str
    cause: str

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_s / self.predicted_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What a window showed.

    Attributes:
        plan: that was compared with.
        iteration: complete iterations at the end of the window.
        iteration_s: median seconds of an iteration.
        stage_s: median seconds of each stage, waits included.
        deviations: the stages that are off.
        evidence: what else was seen.
    """

    plan: Plan
    iteration: int
    iteration_s: float
    stage_s: dict[StageKey, float]
    deviations: tuple[Deviation, ...]
    evidence: Evidence

    @property
    def lines(self) -> tuple[str, ...]:
        """A line for each cause."""
        by_cause: dict[str, list[str]] = {}
        for d in self.deviations:
            by_cause.setdefault(d.cause, []).append(
                f"{d.name} takes {format_seconds(d.measured_s)} an iteration, "
                f"{significant(d.ratio)} times the {format_seconds(d.predicted_s)} predicted"
            )
        if not by_cause:
            return ("every stage takes what was predicted again",)
        return tuple(f"{'; '.join(rows)}: {cause}" for cause, rows in by_cause.items())

    @property
    def observed(self) -> Observed:
        """What a planner makes of it."""
        kinds = {deviation.kind for deviation in self.deviations}
        return Observed(
            plan=self.plan,
            stage_s=self.stage_s,
            is_machine_wide=bool(kinds & {"quota", "load", "slower", "faster"}),
            is_contention="contention" in kinds,
            slowdown=self.evidence.slowdown,
        )

    def pays(self, other: Plan, *, iterations_left: int, switch_s: float) -> bool:
        """Whether going on under another plan saves more than the change costs, for certain."""
        if (other.scheme, other.placement) == (self.plan.scheme, self.plan.placement):
            return False
        gain_s = self.iteration_s - other.chosen.iteration_s
        is_clear = gain_s > SWITCH_GAIN_FRACTION * self.iteration_s
        return is_clear and gain_s * iterations_left > _SAFETY * switch_s

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "iteration": self.iteration,
            "iteration_s": self.iteration_s,
            "predicted_iteration_s": self.plan.chosen.iteration_s,
            "deviations": [{**dataclasses.asdict(d), "ratio": d.ratio} for d in self.deviations],
        }


@dataclass(slots=True)
class _Window:
    """Iterations gathered so far."""

    stages: list[dict[StageKey, float]]
    iteration_s: list[float]
    lengths: list[float]  # mean episode lengths
    total_s: float = 0.0

    def median(self, key: StageKey) -> float:
        return statistics.median(row.get(key, 0.0) for row in self.stages)

    def noise(self, key: StageKey) -> float:
        """Standard error of the median over the median, by the median absolute deviation."""
        times = [row.get(key, 0.0) for row in self.stages]
        middle = statistics.median(times)
        if middle <= 0:
            return 0.0
        spread = 1.4826 * statistics.median(abs(t - middle) for t in times) / middle
        return 1.2533 * spread / math.sqrt(len(times))

    @property
    def length(self) -> float | None:
        return self.lengths[-1] if self.lengths else None


class SelfCheck(Callback):
    """Gathers windows; :meth:`judge` compares one that is complete with the plan."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self.is_due = False

    def on_start(self, start: RunStart) -> None:
        """Begin with the plan that the run starts from."""
        self.on_switch(start.plan)
        self._is_planned_again = False

    def on_switch(self, plan: Plan) -> None:
        """Begin anew with another plan."""
        self._plan = plan
        self._is_planned_again = True
        self._skip = WARM_UP_ITERATIONS
        self._window_s = FIRST_WINDOW_S
        self._first: _Window | None = None
        self._said: dict[StageKey, float] = {}
        self._begin()

    def _begin(self) -> None:
        self._window = _Window([], [], [])
        self.is_due = False
        self._witness.begin()

    def on_iteration(self, report: IterationReport) -> None:
        """Gather an iteration."""
        if self._skip:
            self._skip -= 1
            if not self._skip:
                self._begin()
            return
        window = self._window
        window.stages.append(report.stage_s)
        window.iteration_s.append(report.iteration_s)
        window.total_s += report.iteration_s
        if report.mean_length is not None:
            window.lengths.append(report.mean_length)
        self._iteration, self._engines = report.iteration, report.engines
        self.is_due = len(window.stages) >= WINDOW_ITERATIONS and window.total_s >= self._window_s

    def is_off(self) -> bool:
        """Whether the complete window differs from the plan in a way that was not said yet."""
        return bool(self._news(self._off_stages()))

    def judge(self) -> Check:
        """Why it differs; call it while nothing of the run is at work."""
        evidence = self._witness.read()
        off = self._off_stages()
        self._said = {**self._said, **self._ratios(off)} if off else {}
        window = self._window
        keys = dict.fromkeys(key for row in window.stages for key in row)
        return Check(
            plan=self._plan,
            iteration=self._iteration,
            iteration_s=statistics.median(window.iteration_s),
            stage_s={key: window.median(key) for key in keys},
            deviations=tuple(self._deviation(stage, evidence) for stage in off),
            evidence=evidence,
        )

    def next_window(self) -> None:
        """Leave the complete window behind."""
        if self._first is None:
            self._first = self._window
        self._window_s = min(LONGEST_WINDOW_S, 2 * self._window_s)
        self._begin()

    def _off_stages(self) -> list[Stage]:
        iteration_s = max(
            self._plan.chosen.iteration_s, statistics.median(self._window.iteration_s)
        )
        return [
            stage
            for stage in self._plan.chosen.stages
            if stage.name != "wait" and self._is_off(stage, iteration_s)
        ]

    def _is_off(self, stage: Stage, iteration_s: float) -> bool:
        measured_s = self._window.median((stage.name, stage.lane))
        matters = abs(measured_s - stage.total_s) > _MATTERS_FRACTION * iteration_s
        return matters and self._differs(stage)

    def _differs(self, stage: Stage) -> bool:
        """Whether a stage has left its interval, be it as short as it may."""
        key = stage.name, stage.lane
        measured_s = self._window.median(key)
        if measured_s <= 0 or stage.low_s <= 0:  # a lane that the host's clock cannot see
            return False
        distance = math.log(measured_s / stage.total_s)
        bound_s = stage.high_s if distance > 0 else stage.low_s
        width = math.hypot(math.log(bound_s / stage.total_s), Z90 * self._window.noise(key))
        return abs(distance) > width

    def _news(self, off: Sequence[Stage]) -> bool:
        """Whether a stage is off that was not, or by another factor, or none is any more."""
        if not off:
            return bool(self._said)
        return any(
            key not in self._said
            or abs(math.log(ratio / self._said[key])) > math.log1p(_CHANGE_FRACTION)
            for key, ratio in self._ratios(off).items()
        )

    def _ratios(self, off: Sequence[Stage]) -> dict[StageKey, float]:
        return {(s.name, s.lane): self._window.median((s.name, s.lane)) / s.total_s for s in off}

    # ------------------------------------------------------------------------------------- causes

    def _deviation(self, stage: Stage, evidence: Evidence) -> Deviation:
        key = stage.name, stage.lane
        kind, cause = self._cause(stage, evidence)
        return Deviation(
            name=stage.name,
            lane=stage.lane,
            predicted_s=stage.total_s,
            measured_s=self._window.median(key),
            noise_fraction=self._window.noise(key),
            kind=kind,
            cause=cause,
        )

    def _cause(self, stage: Stage, evidence: Evidence) -> tuple[str, str]:
        is_slow = self._window.median((stage.name, stage.lane)) > stage.total_s
        on = self._device_of(stage)
        lost = [v for v in self._engines if v.dropped_because and v.step == _STEPS.get(stage.name)]
        if is_slow and lost:
            return "engine", f"the engine {lost[0].engine} was dropped ({lost[0].dropped_because})"
        slowdown = evidence.slowdown.get(on, 1.0)
        if is_slow and evidence.throttled_fraction > _THROTTLED_FRACTION:
            share = format_percent(evidence.throttled_fraction)
            return "quota", f"the CPU quota held the program up for {share} of the time"
        if is_slow and evidence.other_cpus > _LOAD_CPUS:
            share = f"{significant(evidence.other_cpus, 2)} of {evidence.usable_cpus} CPUs"
            return "load", f"other programs took {share} meanwhile"
        if self._is_environments_own(stage):
            return "environment", self._describe_environment(stage)
        if is_slow and slowdown > 1 + _SLOWDOWN_TOLERANCE:
            return "slower", (
                f"{on} itself takes {significant(slowdown, 2)} times as long for a calibrated task "
                "as it did (a lower clock, heat, or work of others that shows in no counter)"
            )
        if not is_slow and slowdown < 1 - _SLOWDOWN_TOLERANCE:
            return "faster", (
                f"{on} itself takes {significant(slowdown, 2)} times as long for a calibrated task "
                "as it did: `autoplace calibrate --force` times it as it is now"
            )
        if not is_slow and self._is_planned_again:
            return "relief", "what slowed the machine when this was planned seems to be gone"
        if is_slow and overlaps(self._plan.scheme) and not is_accelerator(on):
            return "contention", (
                "sampling and learning slow each other down: at rest, the CPU is as fast as it was"
            )
        return "unknown", "no cause was seen: `autoplace calibrate --force` times everything anew"

    def _device_of(self, stage: Stage) -> str:
        placement = self._plan.placement
        if stage.name == "policy_step":
            return placement.sample_device
        return placement.learn_device if stage.name in ("gae", "update") else CPU

    def _is_environments_own(self, stage: Stage) -> bool:
        """Whether of what the sampler does only stepping the environments is off."""
        return stage.name == "env_step" and not any(
            self._differs(other)
            for other in self._plan.chosen.stages
            if other.lane == SAMPLER and other.name not in ("env_step", "handoff", "wait")
        )

    def _describe_environment(self, stage: Stage) -> str:
        key = stage.name, stage.lane
        then, now_s = self._first, self._window.median(key)
        if then is not None and then.length and self._window.length:
            then_s = then.median(key)
            noise = Z90 * math.hypot(then.noise(key), self._window.noise(key))
            if abs(math.log(now_s / then_s)) > max(noise, math.log1p(_SLOWDOWN_TOLERANCE)):
                return (
                    "the environment itself has changed with the policy: "
                    f"{format_seconds(then_s)} at first, with episodes of {then.length:.0f} steps, "
                    f"now of {self._window.length:.0f}"
                )
        return (
            "the environment itself: it was timed under random actions, and other states and "
            "lengths of episodes cost other times"
        )
