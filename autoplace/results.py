"""What a run did, and how that compares with what its plan said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoplace.engines import Verdict
from autoplace.planner.plan import Candidate, Plan

StageKey = tuple[str, str]  # (stage name, lane)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What happened in one call of ``train``, by the stage names of the plan.

    Attributes:
        scheme: how the iterations were laid out.
        env_steps: env steps of the whole run, those before a resume included.
        call_env_steps: env steps of this call.
        iterations: complete iterations of this call.
        wall_s: seconds of this call, from the environments' first reset to the last iteration.
        env_steps_per_s: env steps per second of this call; its first iteration, which warms
            caches and allocators up, is left out where there are more.
        iteration_s: median seconds of an iteration, the first left out.
        mean_return: over the last 100 episodes; ``None`` while no episode has ended.
        num_episodes: episodes that ended in this call.
        stage_s: median seconds of each (stage, lane) per iteration, the first left out.
        interrupted: whether it was stopped before all steps were done.
        run_dir: where it was kept, ``None`` where nowhere.
        seed: of the run.
        policy_lag: mean age, in iterations, of the weights that sampled this call's rollouts.
        max_policy_lag: the oldest of them.
        switches: how often it went on under another plan.
        plan: that it followed last, which ``scheme``, ``iteration_s`` and ``stage_s`` are of.
        worker_restarts: workers of the environments that were lost and started anew.
        engines: what came of each that was compared with the eager one.
    """

    scheme: str
    env_steps: int
    call_env_steps: int
    iterations: int
    wall_s: float
    env_steps_per_s: float
    iteration_s: float
    mean_return: float | None
    num_episodes: int
    stage_s: dict[StageKey, float] = field(default_factory=dict)
    interrupted: bool = False
    run_dir: str | None = None
    seed: int = 0
    policy_lag: float = 0.0
    max_policy_lag: int = 0
    switches: int = 0
    plan: Plan | None = None
    worker_restarts: int = 0
    engines: tuple[Verdict, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON object; stages are listed with their lane."""
        return {
            "scheme": self.scheme,
            "env_steps": self.env_steps,
            "call_env_steps": self.call_env_steps,
            "iterations": self.iterations,
            "wall_s": self.wall_s,
            "env_steps_per_s": self.env_steps_per_s,
            "iteration_s": self.iteration_s,
            "mean_return": self.mean_return,
            "num_episodes": self.num_episodes,
            "stage_s": stage_seconds(self.stage_s),
            "stages": [
                {"name": name, "lane": lane, "measured_s": seconds}
                for (name, lane), seconds in self.stage_s.items()
            ],
            "interrupted": self.interrupted,
            "run_dir": self.run_dir,
            "seed": self.seed,
            "policy_lag": self.policy_lag,
            "max_policy_lag": self.max_policy_lag,
            "switches": self.switches,
            "worker_restarts": self.worker_restarts,
            "engines": [verdict.to_json() for verdict in self.engines],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a run would do.

    Attributes:
        run_dir: where it would be kept.
        seed: of the run.
        total_steps: what it is to reach.
        first_iteration: 0, or where it would go on.
        num_iterations: of the whole run.
        iteration_rows: env steps of each.
        iteration_s: predicted seconds of each.
    """

    run_dir: str
    seed: int
    total_steps: int
    first_iteration: int
    num_iterations: int
    iteration_rows: int
    iteration_s: float

    @property
    def iterations(self) -> int:
        """Those that are left."""
        return max(0, self.num_iterations - self.first_iteration)

    @property
    def predicted_s(self) -> float:
        """Seconds that they would take, start-up left out."""
        return self.iterations * self.iteration_s

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "run_dir": self.run_dir,
            "seed": self.seed,
            "total_steps": self.total_steps,
            "first_iteration": self.first_iteration,
            "num_iterations": self.num_iterations,
            "env_steps": self.iterations * self.iteration_rows,
            "predicted_s": self.predicted_s,
        }


def stage_seconds(stages: dict[StageKey, float]) -> dict[str, float]:
    """Seconds by ``name``, or ``name@lane`` for what several lanes have (waits, copies)."""
    names = [name for name, _ in stages]
    return {
        name if names.count(name) == 1 else f"{name}@{lane}": seconds
        for (name, lane), seconds in stages.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StageComparison:
    """A stage as planned and as it was.

    Attributes:
        name: of the stage.
        lane: it runs on.
        predicted_s: seconds per iteration in the plan.
        low_s: lower end of the prediction's 90 % interval.
        high_s: upper end of the prediction's 90 % interval.
        measured_s: seconds per iteration; ``None`` where the host's clock cannot see the lane.
    """

    name: str
    lane: str
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float | None

    @property
    def inside(self) -> bool | None:
        """Whether the measured time lies in the predicted interval."""
        if self.measured_s is None:
            return None
        return self.low_s <= self.measured_s <= self.high_s


def compare_stages(plan: Plan, result: RunResult) -> tuple[StageComparison, ...]:
    """Each stage of the plan beside what was measured, in the plan's order."""
    return stage_comparisons(plan.chosen, result.stage_s)


def stage_comparisons(
    candidate: Candidate, stage_s: Mapping[StageKey, float]
) -> tuple[StageComparison, ...]:
    """Each stage of a candidate beside what was measured, in the candidate's order."""
    return tuple(
        StageComparison(
            name=stage.name,
            lane=stage.lane,
            predicted_s=stage.total_s,
            low_s=stage.low_s,
            high_s=stage.high_s,
            measured_s=stage_s.get((stage.name, stage.lane)),
        )
        for stage in candidate.stages
    )
