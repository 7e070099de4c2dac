"""Candidates raced: each alive in a run of its own, taking turns on the machine.

What disturbs a machine (clock rates, other programs) disturbs turns that follow each other alike,
so candidates that take turns can be told apart by far less than runs one after the other could.
While one has its turn the others rest: nothing of theirs is at work. The first iterations of a turn
fill caches and pipelines again and do not count.

A best candidate looks better than it is, for it was picked by the same noise that is in its score.
So turns are split in halves: the best of one half is scored on the other (``regret_fraction``), and
the halves of each candidate beside each other show what the noise alone does (``noise_fraction``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autoplace.cost_model import CostModel
from autoplace.device import now, torch_threads
from autoplace.errors import UsageError
from autoplace.measurement import Calibration
from autoplace.planner.plan import Candidate, Placement, Plan
from autoplace.planner.search import make_plan
from autoplace.results import StageComparison, StageKey, stage_comparisons
from autoplace.train.callbacks import Callback, IterationReport
from autoplace.train.interrupt import StopRequest, StopRequested, stop_on_signals
from autoplace.train.loop import Loop, open_loop, threads_of

# Turns that the seconds of a candidate are cut into, and the fewest that there are.
_TURNS = 12
MIN_TURNS = 4
_MANY_STEPS = 1 << 40  # no end of a raced run is in sight: its learning rate stays what it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Raced:
    """A candidate and what was measured of it.

    Attributes:
        candidate: with its prediction, all zero where there is none.
        name: what it is called among the others.
        rows: env steps of one iteration, as predictions count them.
        turns_s: mean seconds of an iteration, an entry per turn.
        stage_s: median seconds of each (stage, lane) in an iteration.
    """

    candidate: Candidate
    name: str
    rows: int
    turns_s: tuple[float, ...]
    stage_s: dict[StageKey, float] = dataclasses.field(default_factory=dict)

    @property
    def iteration_s(self) -> float:
        """Median over the turns."""
        return statistics.median(self.turns_s)

    @property
    def env_steps_per_s(self) -> float:
        """At the median iteration."""
        return self.rows / self.iteration_s

    @property
    def halves(self) -> tuple[float, float]:
        """Scores by either half of the turns.

        Candidates go first to last in even rounds and last to first in odd ones. Rounds 0, 3, 4,
        7, ... make one half, 1, 2, 5, 6, ... the other, so that both have as many of either.
        """
        first = [s for i, s in enumerate(self.turns_s) if i % 4 in (0, 3)]
        second = [s for i, s in enumerate(self.turns_s) if i % 4 in (1, 2)]
        return self._score(first), self._score(second)

    @property
    def score(self) -> float:
        """What candidates are ranked by (:meth:`Candidate.score_at`)."""
        return self._score(self.turns_s)

    @property
    def stages(self) -> tuple[StageComparison, ...]:
        """Predicted beside measured."""
        return stage_comparisons(self.candidate, self.stage_s)

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "name": self.name,
            "scheme": self.candidate.scheme,
            "placement": self.candidate.placement.to_json(),
            "predicted_env_steps_per_s": self.candidate.env_steps_per_s,
            "measured_env_steps_per_s": self.env_steps_per_s,
            "sample_efficiency": self.candidate.sample_efficiency,
            "turns_s": list(self.turns_s),
            "stages": [
                {
                    "name": stage.name,
                    "lane": stage.lane,
                    "predicted_s": stage.predicted_s,
                    "measured_s": stage.measured_s,
                }
                for stage in self.stages
            ],
        }

    def _score(self, turns_s: Sequence[float]) -> float:
        return self.candidate.score_at(self.rows / statistics.median(turns_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    """What a race said.

    Attributes:
        entrants: the candidate that was chosen comes first.
    """

    entrants: tuple[Raced, ...]

    @property
    def chosen(self) -> Raced:
        """What the plan chose."""
        return self.entrants[0]

    @property
    def best(self) -> Raced:
        """The one with the highest score."""
        return max(self.entrants, key=lambda entrant: entrant.score)

    @property
    def regret_fraction(self) -> float:
        """What the choice loses against the best, picked on one half, scored on the other; >= 0."""
        lost = []
        for pick, judge in ((0, 1), (1, 0)):
            best = max(self.entrants, key=lambda entrant: entrant.halves[pick])
            lost.append(1 - self.chosen.halves[judge] / best.halves[judge])
        return max(0.0, statistics.mean(lost))

    @property
    def noise_fraction(self) -> float:
        """By how much the halves of the same candidate differ: the median over the candidates."""
        return statistics.median(
            abs(math.log(first / second)) for first, second in (e.halves for e in self.entrants)
        )

    def to_json(self) -> dict[str, Any]:
        """The race as ``autoplace compare --json`` prints it."""
        return {
            "candidates": [entrant.to_json() for entrant in self.entrants],
            "chosen": self.chosen.name,
            "best": self.best.name,
            "regret_fraction": self.regret_fraction,
            "noise_fraction": self.noise_fraction,
        }


# --------------------------------------------------------------------------------------------------
# Who runs


def best_of_schemes(plan: Plan, schemes: Sequence[str] = ()) -> list[tuple[str, Candidate]]:
    """The chosen candidate, and the best of every other scheme (of those named, if any are).

    Raises:
        UsageError: there is no such scheme, or it cannot run here.
    """
    best = plan.best_of_schemes
    refused = {c.scheme: c.rejected_because for c in plan.rejected[::-1] if c.scheme not in best}
    for name in schemes:
        if name not in best:
            known = ", ".join(dict.fromkeys((*best, *refused)))
            reason = refused.get(name, f"there is no such scheme, only {known}")
            raise UsageError(f"--schemes names {name}, which cannot run here: {reason}")
    wanted = schemes or tuple(best)
    return [(name, c) for name, c in best.items() if name in (plan.scheme, *wanted)]


def fixed_rules(
    plan: Plan, calibration: Calibration, model: CostModel, default_threads: int
) -> list[tuple[str, Candidate]]:
    """What people do who measure nothing: all on the CPU, in one process, in so many threads.

    The minibatch is that of the plan, so that only the placement differs.
    """
    chosen = plan.chosen
    workload = plan.workload.replace(minibatch_rows=chosen.placement.minibatch_rows)
    rules = []
    for name, threads in (("one thread", 1), (f"{default_threads} threads", default_threads)):
        given = {
            "env_backend": "sync",
            "num_workers": 0,
            "num_groups": 1,
            "sample_threads": threads,
            "learn_threads": threads,
            "engine": "eager",
        }
        planned = make_plan(calibration, workload, scheme="cpu", placement=given, model=model)
        rule = dataclasses.replace(planned.chosen, sample_efficiency=chosen.sample_efficiency)
        rules.append((name, rule))
    return rules


def without_repeats(candidates: Sequence[tuple[str, Candidate]]) -> list[tuple[str, Candidate]]:
    """The first of those that run the same."""
    seen: dict[tuple[str, Placement], tuple[str, Candidate]] = {}
    for name, candidate in candidates:
        seen.setdefault((candidate.scheme, candidate.placement), (name, candidate))
    return list(seen.values())


# --------------------------------------------------------------------------------------------------
# The race


def race(
    plan: Plan,
    candidates: Sequence[tuple[str, Candidate]],
    *,
    seconds: float,
    progress: Callable[[float], None] = lambda share: None,
) -> RaceResult:
    """Run candidates for ``seconds`` each, in turns.

    No run is kept: nothing is saved, and what is learned is thrown away.

    Args:
        plan: tells the workload.
        candidates: named, the chosen one first; all are alive at once.
        seconds: of measuring each; slow iterations take longer, for some are needed.
        progress: told which share of the race is done.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM.
        AutoplaceError: whatever ends a run.
    """
    try:
        return _race(plan, candidates, seconds, progress)
    except StopRequested:
        raise KeyboardInterrupt from None


def _race(
    plan: Plan,
    candidates: Sequence[tuple[str, Candidate]],
    seconds: float,
    progress: Callable[[float], None],
) -> RaceResult:
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        entrants = [
            _Entrant(stack, dataclasses.replace(plan, chosen=candidate), stop)
            for _, candidate in candidates
        ]
        # In its turns each has its own number of threads. The number of whoever was opened last
        # would hold for all, and threads that every iteration takes away and gives back wait in a
        # loop, on the core of another process.
        stack.enter_context(torch_threads(1))
        for entrant in entrants:  # processes start, allocators and caches warm up
            entrant.turn(0.0)
        for entrant in entrants:
            entrant.forget()
        budget_s, start_s, rounds = seconds * len(entrants), now(), 0
        while rounds < MIN_TURNS or now() - start_s < budget_s or rounds % 4:
            for entrant in entrants if rounds % 2 == 0 else entrants[::-1]:
                entrant.turn(seconds / _TURNS)
                progress(min(1.0, (now() - start_s) / budget_s))
            rounds += 1
    return RaceResult(
        entrants=tuple(
            entrant.raced(name, candidate)
            for (name, candidate), entrant in zip(candidates, entrants, strict=True)
        )
    )


class _Entrant(Callback):
    """A run that goes on in turns, and remembers the iterations that count."""

    def __init__(self, stack: contextlib.ExitStack, plan: Plan, stop: StopRequest) -> None:
        self._plan = plan
        self._reports: list[IterationReport] = []
        self._counted: list[IterationReport] = []
        self._turns_s: list[float] = []
        self._loop: Loop = stack.enter_context(
            open_loop(plan, total_steps=_MANY_STEPS, callbacks=(self,), stop=stop)
        )

    def on_iteration(self, report: IterationReport) -> None:
        """Keep it."""
        self._reports.append(report)

    def turn(self, seconds: float) -> None:
        """Go on for so long, at least for one iteration that counts, and rest."""
        with threads_of(self._plan):
            # The first iteration finds its caches cold; what overlaps has its pipeline to fill.
            for _ in range(1 + self._plan.placement.max_policy_lag):
                self._loop.iterate()
            self._reports.clear()
            start_s = now()
            while not self._reports or now() - start_s < seconds:
                self._loop.iterate()
            self._loop.rest()
        self._turns_s.append(statistics.mean(report.iteration_s for report in self._reports))
        self._counted += self._reports

    def forget(self) -> None:
        """Start to measure."""
        self._turns_s.clear()
        self._counted.clear()

    def raced(self, name: str, candidate: Candidate) -> Raced:
        """What was measured."""
        keys = dict.fromkeys(key for report in self._counted for key in report.stage_s)
        return Raced(
            candidate=candidate,
            name=name,
            rows=self._plan.workload.hyperparameters.rollout_rows,
            turns_s=tuple(self._turns_s),
            stage_s={
                key: statistics.median(r.stage_s.get(key, 0.0) for r in self._counted)
                for key in keys
            },
        )
