"""The training loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from autoplace.device import now
from autoplace.envs import spawn_seeds
from autoplace.envs.episodes import EpisodeTracker
from autoplace.errors import UsageError
from autoplace.planner.plan import Plan
from autoplace.ppo.network import ActorCritic
from autoplace.results import RunResult
from autoplace.store import RunDir
from autoplace.train.callbacks import Callback
from autoplace.train.draws import Draws
from autoplace.train.interrupt import StopRequest, StopRequested, stop_on_signals
from autoplace.train.run import Run
from autoplace.train.schemes import Scheme, Setup, make_scheme
from autoplace.train.stage_timer import StageTimer
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
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Run a plan.

    A run is made of whole iterations: as many as fit into ``total_steps``, at least one. Ctrl-C and
    SIGTERM end it between two vector steps; the rollout in progress is dropped (and where sampling
    and learning overlap, the one that is being learned from too), everything before it is saved.

    Args:
        plan: the placement, the environment and the hyperparameters.
        total_steps: env steps of the whole run, those before a resume included.
        seed: the same seed repeats a run on the CPU to the bit.
        run_dir: where settings, checkpoints and events are kept; nothing is where it is ``None``.
        resume: go on with the run in ``run_dir``.
        checkpoint_every: keep a checkpoint every so many env steps, beside the latest and the best.
        worker_deadline_s: seconds for which another process of the run may be silent until it
            counts as hung; by default 120 in a vector step and 600 in an update.
        callbacks: told of the start, of each iteration and of the end.

    Raises:
        UsageError: a value cannot work.
        EnvError: the environment cannot be made or misbehaves.
        RunError: the run folder cannot be used, or a loss became NaN or infinite.
    """
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
                callbacks=callbacks,
                stop=stop,
            )
        )
        try:
            while not loop.is_done:
                loop.iterate()
            loop.drain()
        except (StopRequested, KeyboardInterrupt):
            loop.run.interrupted = True
            progress = loop.run.progress
            log.info("stopped after %d of %d iterations", progress.iteration, loop.num_iterations)
        return loop.run.finish()


class Loop:
    """A run that is laid out and goes on iteration by iteration, as its owner wants it to."""

    def __init__(self, run: Run, scheme: Scheme, setup: Setup) -> None:
        self.run = run
        self.num_iterations = setup.iterations.stop
        self._scheme = scheme
        self._hyperparameters = setup.hyperparameters
        self._draws = setup.draws
        self._iteration = setup.iterations.start
        self._start_s: float | None = None  # of the iteration in progress, where work goes on

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
        end_s = now()
        self._iteration += 1
        # Whoever overlaps goes on working while callbacks run.
        self._start_s = end_s if scheme.overlaps else None
        if completed is not None:
            self.run.end_iteration(completed, end_s - start_s)

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
    callbacks: Sequence[Callback] = (),
    stop: StopRequest,
) -> Iterator[Loop]:
    """Lay a run out, and end all that it started at the end of the block; as :func:`train`."""
    workload, placement = plan.workload, plan.placement
    hyper = workload.hyperparameters
    num_iterations = count_iterations(hyper, total_steps)
    with contextlib.ExitStack() as stack:
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
        network = (
            run.resumed_from.build_network(placement.engine)
            if run.resumed_from is not None
            else ActorCritic(
                workload.network,
                seed=seed,
                normalize_observations=hyper.normalize_observations,
                engine=placement.engine,
            )
        )
        setup = Setup(
            placement=placement,
            hyperparameters=hyper,
            description=run.description,
            env_seeds=spawn_seeds(seed, hyper.num_envs, stream=run.progress.iteration),
            draws=Draws(workload, seed),
            network=network,
            iterations=range(run.progress.iteration, num_iterations),
            episodes=EpisodeTracker(hyper.num_envs, run.progress.recent_episodes),
            resources=stack,
            timer=StageTimer(),
            stop=stop,
            worker_deadline_s=worker_deadline_s,
        )
        scheme = make_scheme(plan.scheme, setup)
        run.start(setup, scheme.learner)
        scheme.start()
        yield Loop(run, scheme, setup)


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
