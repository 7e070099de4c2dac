"""Training over each backend: the same numbers, what is counted, and what ends a run."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time

import gymnasium as gym
import psutil
import pytest
import torch

from autoplace import store
from autoplace.errors import EnvError, UsageError
from autoplace.train import train
from autoplace.train.checkpoint import load_checkpoint
from tests.envs.toys import Counter, register
from tests.train.plans import Listener, make_plan


def plan_with(backend, num_workers=0, **kwargs):
    plan = make_plan(**kwargs)
    placement = dataclasses.replace(
        plan.chosen.placement, env_backend=backend, num_workers=num_workers
    )
    chosen = dataclasses.replace(plan.chosen, placement=placement)
    return dataclasses.replace(plan, chosen=chosen, candidates=(chosen,))


def test_worker_processes_train_to_the_same_weights_as_sync():
    weights = []
    for backend, workers in (("sync", 0), ("process", 2), ("joint", 2)):
        listener = Listener()
        train(plan_with(backend, workers, num_envs=3), total_steps=200, callbacks=[listener])
        weights.append(listener.flat)
    first, *others = weights
    assert all(torch.equal(first, other) for other in others)


def test_only_real_transitions_are_counted_and_seen():
    """CartPole's own vector environment spends a step on each reset."""
    listener = Listener()
    result = train(
        plan_with("vector", num_envs=4, rollout_steps=64), total_steps=2048, callbacks=[listener]
    )
    last = listener.reports[-1]
    assert result.num_episodes > 20
    assert result.env_steps == result.call_env_steps == last.env_steps == last.call_env_steps
    # Every episode that ended cost a row, but for the (at most 4) whose reset is still to come.
    assert 0 <= result.num_episodes - (2048 - result.env_steps) <= 4
    # The statistics of observations have seen these and no others.
    assert listener.policy.network.observation_count == result.env_steps


def test_a_worker_that_is_killed_ends_the_run_with_everything_saved(tmp_path):
    class Slow(Listener):
        def on_iteration(self, report):
            super().on_iteration(report)
            if report.iteration == 3:
                for child in psutil.Process().children():
                    if child.pid not in before and "spawn_main" in " ".join(child.cmdline()):
                        child.kill()
                        return

    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(EnvError, match=r"environment worker \d .*was killed by SIGKILL"):
        train(
            plan_with("process", 2, num_envs=4),
            total_steps=100_000,
            run_dir=tmp_path / "run",
            callbacks=[Slow()],
        )
    assert load_checkpoint(tmp_path / "run").progress.iteration == 3
    with store.resume_run_dir(tmp_path / "run"):
        pass  # the folder has been let go
    assert {child.pid for child in psutil.Process().children()} <= before


def test_a_worker_that_is_killed_may_be_restarted_and_the_run_goes_on(tmp_path, caplog):
    class KillsOne(Listener):
        def on_iteration(self, report):
            super().on_iteration(report)
            if report.iteration == 3:
                for child in psutil.Process().children():
                    if child.pid not in before and "spawn_main" in " ".join(child.cmdline()):
                        child.kill()
                        return

    before = {child.pid for child in psutil.Process().children()}
    listener = KillsOne()
    result = train(
        plan_with("process", 2, num_envs=4, normalize_observations=True),
        total_steps=640,
        run_dir=tmp_path / "run",
        restart_workers=True,
        callbacks=[listener],
    )
    assert result.worker_restarts == 1 and result.to_json()["worker_restarts"] == 1
    assert result.iterations == 10 and not result.interrupted
    assert "is restarted, and its environments begin new episodes" in caplog.text
    # Two of the four environments lost one step: no transition, and not counted as one.
    assert result.env_steps == 640 - 2
    assert listener.policy.network.observation_count == 640 - 2
    assert {child.pid for child in psutil.Process().children()} <= before


def test_a_worker_that_hangs_ends_the_run_after_the_deadline_that_was_given(tmp_path):
    def hang(step):
        if step == 50:
            time.sleep(3600)
        return 1.0

    env_id = register("Hangs", lambda: Counter(reward=hang))
    plan = plan_with("process", 2, env=env_id, num_envs=2, rollout_steps=16)
    with pytest.raises(EnvError, match=r"worker 0 \(environments 0\) has not answered for 0.7 s"):
        train(plan, total_steps=10_000, run_dir=tmp_path / "run", worker_deadline_s=0.7)
    assert load_checkpoint(tmp_path / "run").progress.iteration == 3
    gym.registry.pop(env_id)
    with pytest.raises(UsageError, match="--worker-deadline must be above 0, got 0"):
        train(make_plan(), total_steps=100, worker_deadline_s=0.0)


def test_an_exception_in_a_worker_ends_the_run_with_everything_saved(tmp_path):
    def boom(step):
        if step == 50:
            raise ValueError("no wheels")
        return 1.0

    env_id = register("Breaks", lambda: Counter(reward=boom))
    plan = plan_with("process", 2, env=env_id, num_envs=2, rollout_steps=16)
    with pytest.raises(EnvError, match=r"ValueError from .*environment 0, vector step 50: no whee"):
        train(plan, total_steps=10_000, run_dir=tmp_path / "run")
    assert load_checkpoint(tmp_path / "run").progress.iteration == 3
    gym.registry.pop(env_id)


def test_ctrl_c_ends_a_run_over_workers_as_any_other(tmp_path):
    class Interrupts(Listener):
        def on_iteration(self, report):
            super().on_iteration(report)
            if report.iteration == 2:
                threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()

    result = train(
        plan_with("process", 2, num_envs=4),
        total_steps=10_000_000,
        run_dir=tmp_path / "run",
        callbacks=[Interrupts()],
    )
    assert result.interrupted and result.iterations >= 2
    assert load_checkpoint(tmp_path / "run").progress.iteration == result.iterations
