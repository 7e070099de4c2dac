"""What a run tells to whoever listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autoplace.engines import Verdict
from autoplace.envs.episodes import Episode
from autoplace.planner.plan import Plan
from autoplace.ppo.update import UpdateStats
from autoplace.results import RunResult, StageKey

if TYPE_CHECKING:
    from autoplace.train.policy import Policy
    from autoplace.train.self_check import Check

SAMPLER = "sampler"  # the lane


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """A run that is about to sample.

    Attributes:
        plan: that it follows.
        seed: of the run.
        total_steps: what the run is to reach.
        num_iterations: of the whole run.
        first_iteration: 0, or where it was resumed.
        env_steps: 0, or where it was resumed.
        run_dir: where it is kept, ``None`` where nowhere.
        snapshot: gives the policy as it is between two iterations, on the host.
    """

    plan: Plan
    seed: int
    total_steps: int
    num_iterations: int
    first_iteration: int
    env_steps: int
    run_dir: Path | None
    snapshot: Callable[[], Policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationReport:
    """A complete iteration.

    Attributes:
        iteration: complete iterations of the whole run.
        num_iterations: of the whole run.
        env_steps: of the whole run.
        total_steps: what the run is to reach.
        rows: env steps of this iteration.
        call_env_steps: of this call.
        iteration_s: seconds of this iteration.
        call_wall_s: seconds of this call.
        run_wall_s: seconds of the whole run, over every call.
        env_steps_per_s: of this call; its first iteration, which warms up, is left out.
        time_left_s: at that rate.
        mean_return: over the last 100 episodes; ``None`` while no episode has ended.
        mean_length: likewise.
        num_episodes: episodes that ended in this call.
        longest_running: steps that the longest episode in progress has taken.
        episodes: those that ended in this iteration; their ``env_steps`` are of the whole run.
        policy_lag: mean age, in iterations, of the weights that sampled the rollout.
        max_policy_lag: the oldest of them.
        stage_s: seconds of each (stage, lane), waits included.
        update: losses and what else the update said.
        engines: what came, so far, of each engine that was compared with the eager one.
    """

    iteration: int
    num_iterations: int
    env_steps: int
    total_steps: int
    rows: int
    call_env_steps: int
    iteration_s: float
    call_wall_s: float
    run_wall_s: float
    env_steps_per_s: float
    time_left_s: float
    mean_return: float | None
    mean_length: float | None
    num_episodes: int
    longest_running: int
    episodes: tuple[Episode, ...]
    policy_lag: float
    max_policy_lag: int
    stage_s: dict[StageKey, float]
    update: UpdateStats
    engines: tuple[Verdict, ...] = ()

    @property
    def env_only_steps_per_s(self) -> float:
        """Env steps per second of env stepping alone, in this iteration."""
        return self._rate(self.stage_s.get(("env_step", SAMPLER), 0.0))

    @property
    def sampling_steps_per_s(self) -> float:
        """Env steps per second of sampling: the sampler's lane without its waits."""
        busy = (s for (name, lane), s in self.stage_s.items() if lane == SAMPLER and name != "wait")
        return self._rate(sum(busy))

    @property
    def iteration_steps_per_s(self) -> float:
        """Env steps per second of this whole iteration."""
        return self._rate(self.iteration_s)

    def _rate(self, seconds: float) -> float:
        return self.rows / seconds if seconds > 0 else 0.0


class Callback:
    """Override what you need. Called in the training process, between iterations.

    Raising :class:`autoplace.train.StopRequested` from :meth:`on_iteration` ends the run as Ctrl-C
    does: with everything saved.
    """

    def on_start(self, start: RunStart) -> None:
        """Before the first iteration."""

    def on_iteration(self, report: IterationReport) -> None:
        """After each iteration."""

    def on_check(self, check: Check) -> None:
        """After a comparison with the plan that found something new."""

    def on_switch(self, plan: Plan) -> None:
        """The run goes on under another plan, from the next iteration on."""

    def on_end(self, result: RunResult) -> None:
        """After the last iteration, also of an interrupted run; not after a failure."""
