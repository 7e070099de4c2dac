"""The training loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from autoplace import device as devices
from autoplace.device import now
from autoplace.device_names import is_accelerator
from autoplace.engines import engine_on
from autoplace.envs import Restarts, spawn_seeds
from autoplace.envs.episodes import EpisodeTracker
from autoplace.errors import AutoplaceError, RunError, UsageError, first_line
from autoplace.measurement import Calibration
from autoplace.planner.memory import estimate_bytes
from autoplace.planner.observed import Replan
from autoplace.planner.plan import Plan
from autoplace.ppo.draws import Draws
from autoplace.ppo.network import ActorCritic
from autoplace.results import RunResult
from autoplace.store import RunDir
from autoplace.train.callbacks import Callback
from autoplace.train.checkpoint import Checkpoint
from autoplace.train.engine_log import EngineLog
from autoplace.train.interrupt import StopRequest, StopRequested, stop_on_signals
from autoplace.train.run import Run
from autoplace.train.schemes import Setup, make_scheme
from autoplace.train.self_check import Check, SelfCheck
from autoplace.train.stage_timer import StageTimer
from autoplace.train.witness import SystemWitness, Witness, choose_sentinels
from autoplace.units import format_bytes, format_seconds
from autoplace.workload import Hyperparameters

log = logging.getLogger(__name__)


def train(
    plan: Plan,
    *,
    total_steps: int,
    seed: int = 0,
    run_dir: RunDir | Path | str | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    worker_deadline_s: float | None = None,
    restart_workers: bool = False,
    callbacks: Sequence[Callback] = (),
    calibration: Calibration | None = None,
    replan: Replan | None = None,
    witness: Witness | None = None,
) -> RunResult:
    """Run a plan.

    A run is made of whole iterations: as many as fit into ``total_steps``, at least one. Ctrl-C and
    SIGTERM end it between two vector steps; the rollout in progress is dropped (and where another
    process learns, the one that it learns from too), everything before it is saved.

    Args:
        plan: the placement, the environment and the hyperparameters.
        total_steps: env steps of the whole run, those before a resume included.
        seed: the same seed repeats a run on the CPU to the bit (scheme ``async`` with a policy lag
            of more than 1 excepted).
        run_dir: where settings, checkpoints and events are kept; nothing is where it is ``None``.
        resume: go on with the run in ``run_dir``.
        checkpoint_every: keep a checkpoint every so many env steps, beside the latest and the best.
        worker_deadline_s: seconds for which another process of the run may be silent until it
            counts as hung; by default 120 in a vector step and 600 in an update.
        restart_workers: start a worker of the backend ``process``, or a process that samples, anew
            when it died, hangs or leaks; its environments begin new episodes. By
            default it ends the run.
        callbacks: told of the start, of each iteration and of the end.
        calibration: that the plan was made from. With it a machine that is slower than it was can
            be told from other reasons why a stage is off its prediction.
        replan: plans again with what was measured (:func:`make_replanner`); the run goes on under
            what it returns where that saves more than the change costs.
        witness: watches the machine meanwhile; the operating system's counters if not given.

    Raises:
        UsageError: a value cannot work.
        EnvError: the environment cannot be made or misbehaves.
        RunError: the run folder cannot be used, a loss became NaN or infinite, or memory ran out.
    """
    witness = SystemWitness(choose_sentinels(calibration, plan)) if witness is None else witness
    check = SelfCheck(witness)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        loop = stack.enter_context(
            open_loop(
                plan,
                total_steps=total_steps,
                seed=seed,
                run_dir=run_dir,
                resume=resume,
                checkpoint_every=checkpoint_every,
                worker_deadline_s=worker_deadline_s,
                restart_workers=restart_workers,
                callbacks=(check, *callbacks),
                stop=stop,
            )
        )
        try:
            while not loop.is_done:
                loop.iterate()
                if check.is_due:
                    _compare_with_plan(loop, check, replan)
            loop.drain()
        except (StopRequested, KeyboardInterrupt):
            loop.run.interrupted = True
            progress = loop.run.progress
            log.info("stopped after %d of %d iterations", progress.iteration, loop.num_iterations)
        return loop.run.finish()


def _compare_with_plan(loop: Loop, check: SelfCheck, replan: Replan | None) -> None:
    """Say where a run differs from its plan, and go on under a better one where that pays."""
    if check.is_off():
        loop.rest()
        found = check.judge()
        loop.run.tell(found)
        better = _planned_again(found, replan)
        left = loop.num_iterations - loop.run.progress.iteration
        if better is not None and found.pays(better, iterations_left=left, switch_s=loop.switch_s):
            loop.switch(better, instead_of_s=found.iteration_s)
            return
    check.next_window()


def _planned_again(found: Check, replan: Replan | None) -> Plan | None:
    if replan is None:
        return None
    try:
        return replan(found.observed)
    except AutoplaceError as fault:  # a run does not end because nothing better can be found
        log.warning("cannot plan again: %s", fault)
        return None


class Loop:
    """A run that is laid out and goes on iteration by iteration, as its owner wants it to.

    Attributes:
        run: what is not the loop.
        num_iterations: of the whole run.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        stop: StopRequest,
        resources: contextlib.ExitStack,
        worker_deadline_s: float | None,
        restarts: Restarts,
    ) -> None:
        self.run = run
        self._worker_deadline_s = worker_deadline_s
        self._restarts = restarts  # of every layout
        self._engines = EngineLog()  # likewise
        self.num_iterations = run.num_iterations
        self._stop = stop
        self._resources = resources  # of the present layout
        self._lay_out(plan, run.resumed_from)

    def _lay_out(self, plan: Plan, saved: Checkpoint | None) -> None:
        """Put the work where ``plan`` says, to go on from ``saved``."""
        begun_s = now()
        _remark_on_little_memory(plan)
        workload, placement, progress = plan.workload, plan.placement, self.run.progress
        hyper = workload.hyperparameters
        network = (
            saved.build_network(placement.engine)
            if saved is not None
            else ActorCritic(
                workload.network,
                seed=progress.seed,
                normalize_observations=hyper.normalize_observations,
                engine=placement.engine,
            )
        )
        setup = Setup(
            placement=placement,
            hyperparameters=hyper,
            description=self.run.description,
            env_seeds=spawn_seeds(progress.seed, hyper.num_envs, stream=progress.iteration),
            draws=Draws(workload, progress.seed, minibatch_rows=placement.minibatch_rows),
            network=network,
            previous=None if saved is None else saved.previous,
            iterations=range(progress.iteration, self.num_iterations),
            episodes=EpisodeTracker(
                hyper.num_envs, progress.recent_episodes, env_steps=progress.env_steps
            ),
            resources=self._resources,
            timer=StageTimer(),
            stop=self._stop,
            worker_deadline_s=self._worker_deadline_s,
            restarts=self._restarts,
            engines=self._engines,
        )
        scheme = make_scheme(plan.scheme, setup)
        if saved is not None:
            saved.restore(scheme.learner)
        self.run.start(plan, setup, scheme.learner)
        scheme.start()
        self._scheme, self._draws, self._hyperparameters = scheme, setup.draws, hyper
        self._episodes, self._timer = setup.episodes, setup.timer
        self._books_s = setup.draws.spent_s + setup.episodes.spent_s  # accounted for so far
        self._iteration = progress.iteration
        self._start_s: float | None = None  # of the iteration in progress, where work goes on
        self._layout_s = now() - begun_s

    def switch(self, plan: Plan, *, instead_of_s: float) -> None:
        """Go on under another plan, as a stop and a resume would, without the files.

        Weights, optimiser and statistics go on; environments start new episodes, and a rollout in
        flight is dropped.

        Args:
            plan: of the same workload.
            instead_of_s: seconds of an iteration so far, for the message.
        """
        saved = self.run.take()
        self._resources.close()
        self._lay_out(plan, saved)
        log.warning(
            "from iteration %d on: scheme %s, sampling on %s and learning on %s; predicted are %s "
            "an iteration instead of the %s that were measured",
            self._iteration,
            plan.scheme,
            plan.placement.sample_device,
            plan.placement.learn_device,
            format_seconds(plan.chosen.iteration_s),
            format_seconds(instead_of_s),
        )

    @property
    def switch_s(self) -> float:
        """What another layout may cost: what this one took to lay out and to warm up."""
        return self._layout_s + self.run.warm_up_s

    @property
    def is_done(self) -> bool:
        """Whether every rollout has been sampled."""
        return self._iteration >= self.num_iterations

    def iterate(self) -> None:
        """Sample a rollout and learn: from it, or from the one before while it is sampled.

        Raises:
            StopRequested: a stop was asked for between two vector steps.
        """
        scheme, iteration = self._scheme, self._iteration
        start_s = self._start_s if self._start_s is not None else now()
        scheme.sample(iteration)
        with self.run.learning():
            completed = scheme.learn(
                self._draws.permutations(iteration),
                learning_rate=learning_rate(self._hyperparameters, iteration, self.num_iterations),
                iteration=iteration + 1,
            )
            scheme.publish()
        self._keep_books()
        end_s = now()
        self._iteration += 1
        # Whoever overlaps goes on working while callbacks run.
        self._start_s = end_s if scheme.overlaps else None
        if completed is not None:
            self.run.end_iteration(completed, end_s - start_s)

    def _keep_books(self) -> None:
        """Account for what was drawn and counted: to the learner's lane, where that is here."""
        spent_s = self._draws.spent_s + self._episodes.spent_s
        if self._scheme.learner.is_in_place:
            self._timer.add("gae", "learner", spent_s - self._books_s)
        self._books_s = spent_s

    def drain(self) -> None:
        """Complete what is in flight."""
        start_s = self._start_s if self._start_s is not None else now()
        completed = self._scheme.drain()
        if completed is not None:
            self.run.end_iteration(completed, now() - start_s)

    def rest(self) -> None:
        """Wait until nothing is at work; the next iteration, which finds it so, takes longer."""
        self._scheme.rest()
        self._start_s = None


@contextlib.contextmanager
def open_loop(
    plan: Plan,
    *,
    total_steps: int,
    seed: int = 0,
    run_dir: RunDir | Path | str | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    worker_deadline_s: float | None = None,
    restart_workers: bool = False,
    callbacks: Sequence[Callback] = (),
    stop: StopRequest,
) -> Iterator[Loop]:
    """Lay a run out, and end all that it started at the end of the block; as :func:`train`."""
    num_iterations = count_iterations(plan.workload.hyperparameters, total_steps)
    if worker_deadline_s is not None and worker_deadline_s <= 0:
        raise UsageError(f"--worker-deadline must be above 0, got {worker_deadline_s:g}: raise it")
    with _memory_as_error(), contextlib.ExitStack() as stack:
        stack.enter_context(threads_of(plan))
        run = stack.enter_context(
            Run(
                plan,
                total_steps,
                num_iterations,
                seed,
                run_dir,
                resume,
                checkpoint_every,
                callbacks,
            )
        )
        resources = stack.enter_context(contextlib.ExitStack())
        restarts = Restarts(allowed=restart_workers)
        yield Loop(run, plan, stop, resources, worker_deadline_s, restarts)


def _remark_on_little_memory(plan: Plan) -> None:
    """Say where an accelerator has less memory free than this process will need of it."""
    on = plan.placement.learn_device
    if not is_accelerator(on) or plan.placement.max_policy_lag:  # else another process learns
        return
    needed, known = estimate_bytes(plan.workload, plan.placement)[on], devices.memory_bytes(on)
    if known is not None and needed > known[0]:
        log.warning(
            "this run needs about %s on %s, of which %s are free: end what else uses it, or take "
            "fewer --rollout-steps or --num-envs",
            format_bytes(needed),
            on,
            format_bytes(known[0]),
        )


@contextlib.contextmanager
def _memory_as_error() -> Iterator[None]:
    """Memory that ran out, as an error that says what needs less of it."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise RunError(
            f"memory ran out ({first_line(error)}): free some, plan again on this machine, or take "
            "fewer --rollout-steps, --num-envs or --minibatch-rows; what was saved is untouched"
        ) from error


def threads_of(plan: Plan) -> AbstractContextManager[None]:
    """The number of threads that a run has around all of its own blocks."""
    placement = plan.placement
    engine = engine_on(
        placement.engine, placement.sample_device, is_plain=plan.workload.network.is_plain
    )
    return devices.torch_threads(placement.sample_threads, engine)


def count_iterations(hyperparameters: Hyperparameters, total_steps: int) -> int:
    """Whole iterations that fit into ``total_steps``, at least one.

    Raises:
        UsageError: fewer than one step is asked for.
    """
    if total_steps < 1:
        raise UsageError(f"--total-steps must be at least 1, got {total_steps}: raise it")
    return max(1, total_steps // hyperparameters.rollout_rows)


def learning_rate(hyperparameters: Hyperparameters, iteration: int, num_iterations: int) -> float:
    """Adam's step size in ``iteration`` (counted from 0): all of it first, 1/n of it last."""
    if not hyperparameters.anneal_learning_rate:
        return hyperparameters.learning_rate
    return hyperparameters.learning_rate * (1.0 - iteration / num_iterations)
