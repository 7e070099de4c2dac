"""The training loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from autoplace.device import now
from autoplace.envs import make_vector_env, spawn_seeds
from autoplace.envs.episodes import EpisodeTracker
from autoplace.errors import UsageError
from autoplace.planner.plan import Plan
from autoplace.ppo.network import ActorCritic
from autoplace.results import RunResult
from autoplace.store import RunDir
from autoplace.train.callbacks import Callback
from autoplace.train.draws import Draws
from autoplace.train.interrupt import StopRequested, stop_on_signals
from autoplace.train.run import Run
from autoplace.train.schemes import Setup, make_scheme
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
        callbacks: told of the start, of each iteration and of the end.

    Raises:
        UsageError: a value cannot work.
        EnvError: the environment cannot be made or misbehaves.
        RunError: the run folder cannot be used, or a loss became NaN or infinite.
    """
    workload, placement = plan.workload, plan.placement
    hyper = workload.hyperparameters
    num_iterations = count_iterations(hyper, total_steps)

    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        run = stack.enter_context(
            Run(plan, total_steps, num_iterations, seed, run_dir, resume, callbacks)
        )
        envs = make_vector_env(
            run.description,
            num_envs=hyper.num_envs,
            backend=placement.env_backend,
            num_workers=placement.num_workers,
        )
        stack.callback(envs.close)
        network = (
            run.resumed_from.build_network()
            if run.resumed_from is not None
            else ActorCritic(
                workload.network, seed=seed, normalize_observations=hyper.normalize_observations
            )
        )
        setup = Setup(
            placement=placement,
            hyperparameters=hyper,
            envs=envs,
            network=network,
            episodes=EpisodeTracker(hyper.num_envs, run.progress.recent_episodes),
            timer=StageTimer(),
            stop=stop,
        )
        scheme = make_scheme(plan.scheme, setup)
        stack.callback(scheme.close)
        draws = Draws(workload, seed)
        run.start(setup, scheme.learner)
        envs.reset(spawn_seeds(seed, hyper.num_envs, stream=run.progress.iteration))

        try:
            start_s = now()
            for iteration in range(run.progress.iteration, num_iterations):
                scheme.sample(draws.noise(iteration))
                with run.learning():
                    update = scheme.learn(
                        draws.permutations(iteration),
                        learning_rate=learning_rate(hyper, iteration, num_iterations),
                        iteration=iteration + 1,
                    )
                    scheme.publish()
                end_s = now()
                if update is not None:
                    run.end_iteration(update, end_s - start_s)
                # Whoever overlaps goes on working while callbacks run.
                start_s = end_s if scheme.overlaps else now()
            last = scheme.drain()
            if last is not None:
                run.end_iteration(last, now() - start_s)
        except (StopRequested, KeyboardInterrupt):
            run.interrupted = True
            log.info("stopped after %d of %d iterations", run.progress.iteration, num_iterations)
        return run.finish()


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
