"""Everything about a run that is not the loop: folder, checkpoints, reports, the result."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from autoplace import files, store
from autoplace.device import now
from autoplace.envs.description import inspect_env
from autoplace.errors import EnvError, RunError, UsageError
from autoplace.planner.plan import Plan
from autoplace.ppo.network import ActorCritic
from autoplace.results import RunResult
from autoplace.train.callbacks import Callback, IterationReport, RunStart
from autoplace.train.checkpoint import (
    Checkpoint,
    Progress,
    load_checkpoint,
    parse_checkpoint,
    refuse_other_run,
    take_checkpoint,
)
from autoplace.train.episode_log import EpisodeLog
from autoplace.train.learner import Learned
from autoplace.train.policy import Policy
from autoplace.train.saving import Saver
from autoplace.train.schemes.base import Completed, Setup
from autoplace.train.self_check import Check

log = logging.getLogger(__name__)

_WHERE = ("scheme", "sample_device", "learn_device")  # of a placement, for a message
_QUIET_ITERATIONS = 20  # without any finished episode, until that is remarked on


class Run:
    """One call of ``train``, from the folder's lock to the result."""

    def __init__(
        self,
        plan: Plan,
        total_steps: int,
        num_iterations: int,
        seed: int,
        run_dir: store.RunDir | Path | str | None,
        resume: bool,
        checkpoint_every: int | None,
        callbacks: Sequence[Callback],
    ) -> None:
        if checkpoint_every is not None and checkpoint_every < 1:
            raise UsageError(f"--checkpoint-every is 1 or more, got {checkpoint_every}: raise it")
        self._plan = plan
        self.num_iterations = num_iterations
        self._checkpoint_every = checkpoint_every
        self._callbacks = list(callbacks)
        self._stack = contextlib.ExitStack()
        self.description = inspect_env(plan.workload.env)
        _refuse_other_sizes(plan, self.description.workload(plan.workload.hyperparameters).network)
        self._run_dir = self._open(run_dir, resume)
        self.resumed_from: Checkpoint | None = None
        self.progress = Progress(total_steps=total_steps, seed=seed)
        try:
            if resume:
                self.resumed_from = self._load(total_steps, seed)
                saved = self.resumed_from.progress
                self.progress = dataclasses.replace(saved, total_steps=total_steps)
        except BaseException:
            self._stack.close()  # lets the folder go
            raise
        self._saver: Saver | None = None
        self._setup: Setup
        self._is_begun = False
        self.interrupted = False
        self.switches = 0
        self.warm_up_s = 0.0  # of the present layout, up to the end of its first iteration
        self._lag_sum, self._max_lag = 0.0, 0
        self._num_episodes = 0  # that ended under earlier layouts
        self._first = self.progress.iteration
        self._env_steps_before = self.progress.env_steps
        self._wall_before_s = self.progress.wall_s
        self._is_learning = False
        self._warm_env_steps = 0  # of this call, up to the end of its first iteration

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Save what is sound, whatever ends the run, and let the folder go."""
        with self._stack:
            if isinstance(error, Exception) and self._done:
                with contextlib.suppress(Exception):  # the first error is the one to report
                    self._save()

    def start(self, plan: Plan, setup: Setup, learner: Learned) -> None:
        """Everything is laid out: tell the callbacks, and the first time start the clock."""
        if self._is_begun:
            self._num_episodes += self._setup.episodes.num_episodes
        self._plan, self._setup, self._learner = plan, setup, learner
        self._is_warm = False
        if self._run_dir is not None:
            self._write_settings(self._run_dir)
        if not self._is_begun:
            self._begin()
            self._is_begun = True
        else:
            self.switches += 1
            for callback in self._callbacks:
                callback.on_switch(plan)
        self._laid_out_s = now()

    def _begin(self) -> None:
        if self._run_dir is not None:
            from autoplace.train.tensorboard import TensorBoard  # imports tensorboard

            self._saver = Saver(
                self._run_dir, self._plan.workload, self._checkpoint_every, self.progress
            )
            logs = TensorBoard(), EpisodeLog()
            for log_file in logs:
                self._stack.callback(log_file.close)
            self._callbacks = [*logs, *self._callbacks]  # told first: others may end the run
        start = RunStart(
            plan=self._plan,
            seed=self.progress.seed,
            total_steps=self.progress.total_steps,
            num_iterations=self.num_iterations,
            first_iteration=self.progress.iteration,
            env_steps=self.progress.env_steps,
            run_dir=None if self._run_dir is None else self._run_dir.path,
            snapshot=self.snapshot,
        )
        for callback in self._callbacks:
            callback.on_start(start)
        self._start_s = self._warm_s = self._end_s = now()

    def take(self) -> Checkpoint:
        """What the run has come to, to go on from in memory."""
        return parse_checkpoint(take_checkpoint(self._plan.workload, self._learner, self.progress))

    def tell(self, check: Check) -> None:
        """Say what a comparison with the plan found."""
        for line in check.lines:
            log.warning("self-check: %s", line)
        for callback in self._callbacks:
            callback.on_check(check)

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Mark the block in which weights that learn in place are unfit to be saved."""
        self._is_learning = True
        yield
        self._is_learning = False  # not where the block raised: the weights stay unfit

    def end_iteration(self, completed: Completed, iteration_s: float) -> None:
        """Count the iteration, save if it is time to, and tell the callbacks."""
        self._end_s = now()
        rows = completed.num_transitions
        if self._done == 0:
            self._warm_s, self._warm_env_steps = self._end_s, rows
        if not self._is_warm:
            self._is_warm, self.warm_up_s = True, self._end_s - self._laid_out_s
        self.progress = dataclasses.replace(
            self.progress,
            iteration=self.progress.iteration + 1,
            env_steps=self.progress.env_steps + rows,
            wall_s=self._wall_before_s + self._end_s - self._start_s,
            recent_episodes=tuple(self._setup.episodes.recent),
        )
        self._lag_sum += completed.lag.mean
        self._max_lag = max(self._max_lag, completed.lag.max)
        stages = self._setup.timer.end_iteration(iteration_s)
        if self._saver is not None:
            self._saver.end_iteration(self._learner, self.progress)
        self._remark_on_endless_episodes()
        report = self._report(completed, iteration_s, stages)
        for callback in self._callbacks:
            callback.on_iteration(report)

    def finish(self) -> RunResult:
        """Save, and say what happened."""
        self._save()
        timer, episodes = self._setup.timer, self._setup.episodes
        result = RunResult(
            scheme=self._plan.scheme,
            env_steps=self.progress.env_steps,
            call_env_steps=self._call_env_steps,
            iterations=self._done,
            wall_s=self._end_s - self._start_s,
            env_steps_per_s=self._env_steps_per_s,
            iteration_s=timer.iteration_s(),
            mean_return=episodes.mean_return,
            num_episodes=self._num_episodes + episodes.num_episodes,
            stage_s=timer.stage_s(),
            interrupted=self.interrupted,
            run_dir=None if self._run_dir is None else str(self._run_dir.path),
            seed=self.progress.seed,
            policy_lag=self._lag_sum / self._done if self._done else 0.0,
            max_policy_lag=self._max_lag,
            switches=self.switches,
            plan=self._plan,
            worker_restarts=self._setup.restarts.count,
            engines=tuple(self._setup.engines.verdicts),
        )
        if self._run_dir is not None:
            files.write_json_atomic(self._run_dir.result_path, result.to_json())
        for callback in self._callbacks:
            callback.on_end(result)
        return result

    def snapshot(self) -> Policy:
        """The policy as it is, on the host."""
        learned = self._learner.network
        network = ActorCritic(learned.spec, normalize_observations=learned.normalize_observations)
        network.flat.copy_(learned.flat)  # device -> host, when asked for
        return Policy(network, self.description, env_steps=self.progress.env_steps)

    @property
    def _done(self) -> int:
        """Complete iterations of this call."""
        return self.progress.iteration - self._first

    @property
    def _call_env_steps(self) -> int:
        """Env steps of this call."""
        return self.progress.env_steps - self._env_steps_before

    @property
    def _env_steps_per_s(self) -> float:
        """Of this call, its first iteration left out where there are more."""
        counted, since_s = self._call_env_steps, self._start_s
        if self._done > 1:
            counted, since_s = counted - self._warm_env_steps, self._warm_s
        elapsed_s = self._end_s - since_s
        return counted / elapsed_s if elapsed_s > 0 else 0.0

    def _report(
        self, completed: Completed, iteration_s: float, stages: dict[tuple[str, str], float]
    ) -> IterationReport:
        episodes, rate = self._setup.episodes, self._env_steps_per_s
        rows_left = (self.num_iterations - self.progress.iteration) * (
            self._plan.workload.hyperparameters.rollout_rows
        )
        return IterationReport(
            iteration=self.progress.iteration,
            num_iterations=self.num_iterations,
            env_steps=self.progress.env_steps,
            total_steps=self.progress.total_steps,
            rows=completed.num_transitions,
            call_env_steps=self._call_env_steps,
            iteration_s=iteration_s,
            call_wall_s=self._end_s - self._start_s,
            run_wall_s=self.progress.wall_s,
            env_steps_per_s=rate,
            time_left_s=rows_left / rate if rate else 0.0,
            mean_return=episodes.mean_return,
            mean_length=episodes.mean_length,
            num_episodes=self._num_episodes + episodes.num_episodes,
            longest_running=episodes.longest_running,
            episodes=episodes.take_ended(self.progress.env_steps),
            policy_lag=completed.lag.mean,
            max_policy_lag=completed.lag.max,
            stage_s=stages,
            update=completed.update,
            engines=tuple(self._setup.engines.verdicts),
        )

    def _remark_on_endless_episodes(self) -> None:
        episodes = self._setup.episodes
        if self._done == _QUIET_ITERATIONS and episodes.mean_return is None:
            log.warning(
                "no episode has finished in %d iterations (the longest has run for %d steps): "
                "a time limit would show how training goes",
                self._done,
                episodes.longest_running,
            )

    def _open(self, run_dir: store.RunDir | Path | str | None, resume: bool) -> store.RunDir | None:
        if run_dir is None and resume:
            raise UsageError("--resume goes on with the run in a folder: name it by --run-dir")
        if run_dir is None or isinstance(run_dir, store.RunDir):
            return run_dir
        path = Path(run_dir)
        if resume:
            opened = store.resume_run_dir(path)
        else:
            workload = self._plan.workload
            opened = store.create_run_dir(path, env_id=workload.env.id, seed=0)
        return self._stack.enter_context(opened)

    def _load(self, total_steps: int, seed: int) -> Checkpoint:
        assert self._run_dir is not None
        checkpoint = load_checkpoint(self._run_dir.path)
        refuse_other_run(checkpoint, self._plan.workload, seed)
        _say_where_it_goes_on(self._run_dir.path, self._plan)
        before = checkpoint.progress.total_steps
        if before != total_steps and self._plan.workload.hyperparameters.anneal_learning_rate:
            log.warning(
                "the run was to reach %d steps and is now to reach %d: "
                "its learning-rate schedule is stretched to the new total",
                before,
                total_steps,
            )
        return checkpoint

    def _save(self) -> None:
        if self._saver is None or (self._is_learning and self._learner.is_in_place):
            return
        self._saver.save(self._learner, self.progress)

    def _write_settings(self, run_dir: store.RunDir) -> None:
        workload = self._plan.workload
        files.write_json_atomic(
            run_dir.config_path,
            {
                "schema_version": 1,
                "env": workload.env.to_json(),
                "network": workload.network.to_json(),
                "hyperparameters": dataclasses.asdict(workload.hyperparameters),
                "total_steps": self.progress.total_steps,
                "seed": self.progress.seed,
                "scheme": self._plan.scheme,
                "placement": self._plan.placement.to_json(),
            },
        )
        files.write_json_atomic(run_dir.plan_path, self._plan.to_json())


def _say_where_it_goes_on(run_dir: Path, plan: Plan) -> None:
    """One line where a run goes on elsewhere, and whether that changes what is learned."""
    try:
        settings = store.read_run_config(run_dir)
    except RunError:  # the checkpoint says all that a run needs
        return
    before = {"scheme": settings["scheme"], **settings["placement"]}
    after = {"scheme": plan.scheme, **plan.placement.to_json()}
    moved = [name for name in after if name in before and before[name] != after[name]]
    if not moved:
        return
    changes = [
        f"{name.replace('_', ' ')} {after[name]} instead of {before[name]}"
        for name in ("minibatch_rows", "max_policy_lag", "precision")
        if name in moved
    ]
    where = [f"{name} {after[name]} (was {before[name]})" for name in moved if name in _WHERE]
    log.warning(
        "resumed %s: %s",
        "with " + ", ".join(where) if where else "with another placement",
        "this changes learning: " + ", ".join(changes)
        if changes
        else "placed anew, the learning goes on unchanged, with the random draws it would have had",
    )


def _refuse_other_sizes(plan: Plan, network: object) -> None:
    """The environment may have changed since it was described."""
    if network != plan.workload.network:
        raise EnvError(
            f"{plan.workload.env.id} has other sizes than it was planned with "
            f"({network} instead of {plan.workload.network}): plan again"
        )
