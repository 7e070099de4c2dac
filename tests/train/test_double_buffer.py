"""Sampling and learning at once, in two processes."""

import dataclasses
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from autoplace.errors import EnvError, RunError
from autoplace.ppo.update import NonFiniteUpdateError
from autoplace.processes import RemoteTraceback
from autoplace.train import Callback, StopRequested, evaluate, saving, train
from autoplace.train.checkpoint import load_checkpoint
from autoplace.train.sampler import HostSampler
from autoplace.workload import Hyperparameters
from tests.envs.toys import Counter, register
from tests.train.lagged import simulate
from tests.train.plans import Listener, make_plan


def overlapped(env="CartPole-v1", **options):
    return make_plan(env, scheme="double-buffer", **options)


class Watching(Listener):
    """Keeps the weights after each iteration too."""

    def on_iteration(self, report):
        super().on_iteration(report)
        self.weights = [*getattr(self, "weights", []), self.flat.clone()]


class Then(Callback):
    """Does something after an iteration."""

    def __init__(self, iteration, action):
        self.iteration, self.action = iteration, action

    def on_iteration(self, report):
        if report.iteration == self.iteration:
            self.action()


def stop():
    raise StopRequested


def signal_learner(number):
    (process,) = multiprocessing.active_children()
    os.kill(process.pid, number)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_rollout_is_sampled_with_the_weights_of_one_update_ago(env, monkeypatch):
    sampled = []
    sample = HostSampler.sample

    def spy(self, policy_step, noise):
        sampled.append(policy_step._network.flat.clone())
        sample(self, policy_step, noise)

    monkeypatch.setattr(HostSampler, "sample", spy)
    watching = Watching()
    plan = overlapped(env, normalize_rewards=True, entropy_coef=0.01)
    result = train(plan, total_steps=160, callbacks=[watching])
    assert [r.env_steps for r in watching.reports] == [32, 64, 96, 128, 160]
    assert (result.policy_lag, result.max_policy_lag) == (0.8, 1)  # 0, 1, 1, 1, 1
    assert result.iterations == 5 and not result.interrupted

    # Rollouts 0..4 by W(0), W(0), W(1), W(2), W(3); the reports show W(1)..W(5), all different.
    weights = [sampled[0], *watching.weights]
    assert len({tuple(w.tolist()) for w in weights}) == 6
    for k, acted in enumerate(sampled):
        assert torch.equal(acted, weights[max(0, k - 1)])

    # The whole of it is what the lagged algorithm computes one step at a time.
    reference = simulate(plan, num_iterations=5)
    torch.testing.assert_close(watching.flat, reference, atol=1e-5, rtol=1e-5)

    # The same seed repeats to the bit.
    if env == "Pendulum-v1":
        again = Listener()
        train(plan, total_steps=160, callbacks=[again])
        assert torch.equal(again.flat, watching.flat)


def test_lanes_sum_to_the_run_from_one_hand_over_to_the_next():
    listener = Listener()
    result = train(overlapped(), total_steps=128, callbacks=[listener])
    assert multiprocessing.active_children() == []
    report = listener.reports[1]
    assert set(report.stage_s) == {
        ("policy_step", "sampler"),
        ("env_step", "sampler"),
        ("handoff", "sampler"),
        ("wait", "sampler"),
        ("gae", "learner"),
        ("update", "learner"),
        ("handoff", "learner"),
        ("wait", "learner"),
    }
    reports = listener.reports
    for lane in ("sampler", "learner"):
        for each in reports:
            # What a sampler ahead of the learner did before a hand-over counts with its rollout, so
            # one iteration may hold more than its own time; all together cannot.
            total_s = sum(seconds for (_, of), seconds in each.stage_s.items() if of == lane)
            waited_s = each.stage_s["wait", lane]
            assert total_s == pytest.approx(each.iteration_s) or (
                total_s > each.iteration_s and waited_s == 0
            )
        busy_s = sum(
            seconds
            for each in reports
            for (name, of), seconds in each.stage_s.items()
            if of == lane and name != "wait"
        )
        assert busy_s <= sum(each.iteration_s for each in reports) * (1 + 1e-6)
    assert set(result.stage_s) == set(report.stage_s)


def test_a_stop_drops_what_is_in_flight_and_a_resumed_run_goes_on(tmp_path):
    watching = Watching()
    plan = overlapped(normalize_rewards=True)
    result = train(plan, total_steps=160, run_dir=tmp_path, callbacks=[watching, Then(2, stop)])
    assert result.interrupted and result.env_steps == 64
    saved = load_checkpoint(tmp_path)
    assert saved.optimizer["step"].item() == 2 * 2 * 2  # iterations x epochs x minibatches
    assert torch.equal(saved.build_network().flat, watching.weights[1])

    listener = Listener()
    result = train(plan, total_steps=160, run_dir=tmp_path, resume=True, callbacks=[listener])
    assert [report.env_steps for report in listener.reports] == [96, 128, 160]
    assert (result.env_steps, result.call_env_steps) == (160, 96)
    saved = load_checkpoint(tmp_path)
    assert saved.optimizer["step"].item() == 5 * 2 * 2
    assert saved.network["observation_count"].item() == 160
    assert evaluate(tmp_path, episodes=2).env_steps == 160


def test_a_stop_counts_the_steps_that_were_learned_from_and_no_others(tmp_path):
    """CartPole's own vector environment spends a step on each reset, in every rollout."""
    plan = overlapped(num_envs=4, rollout_steps=64)
    placement = dataclasses.replace(plan.placement, env_backend="vector")
    plan = dataclasses.replace(plan, chosen=dataclasses.replace(plan.chosen, placement=placement))
    result = train(plan, total_steps=2048, run_dir=tmp_path, callbacks=[Then(3, stop)])
    saved = load_checkpoint(tmp_path)
    assert result.env_steps == saved.progress.env_steps < 3 * 256
    assert result.env_steps == saved.network["observation_count"].item()


def test_sigint_stops_between_two_vector_steps_with_everything_saved(tmp_path):
    def observe(plain, total_steps):
        if total_steps == 40:  # in the third rollout
            os.kill(os.getpid(), signal.SIGINT)
        return plain

    env = register("InterruptsOverlapped", lambda: Counter(observe=observe))
    result = train(overlapped(env), total_steps=320, run_dir=tmp_path)
    # The third rollout is dropped, and the second one, which is being learned from.
    assert result.interrupted and result.env_steps == 32
    assert load_checkpoint(tmp_path).progress.iteration == 1


def test_truncated_episodes_reach_the_learner():
    env = register("TruncatesOverlapped", lambda: Counter(length=3, truncates=True))
    listener = Listener()
    train(overlapped(env), total_steps=96, callbacks=[listener])
    reference = simulate(overlapped(env), num_iterations=3)
    torch.testing.assert_close(listener.flat, reference, atol=1e-5, rtol=1e-5)


def test_an_update_that_is_not_finite_stops_the_run_and_is_not_saved(tmp_path):
    # Rewards of 1e38 overflow the squared error of the values, from the third rollout on.
    env = register("OverflowsLater", lambda: Counter(reward=lambda s: 1e38 if s > 40 else 1.0))
    with pytest.raises(NonFiniteUpdateError, match="loss of iteration 3 is not finite") as caught:
        train(overlapped(env, normalize_rewards=False), total_steps=320, run_dir=tmp_path)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    saved = load_checkpoint(tmp_path)
    assert saved.progress.iteration == 2 and saved.build_network().flat.isfinite().all()


def test_an_environment_that_breaks_leaves_what_was_learned_saved(tmp_path):
    def observe(plain, total_steps):
        return plain * math.nan if total_steps == 70 else plain

    env = register("BreaksOverlapped", lambda: Counter(observe=observe))
    with pytest.raises(EnvError, match="every observation must be finite"):
        train(overlapped(env), total_steps=320, run_dir=tmp_path)
    assert load_checkpoint(tmp_path).progress.iteration == 3
    assert multiprocessing.active_children() == []


def test_an_error_of_the_learner_arrives_with_its_own_traceback():
    plan = overlapped()
    placement = dataclasses.replace(plan.placement, learn_threads=-1)
    plan = dataclasses.replace(plan, chosen=dataclasses.replace(plan.chosen, placement=placement))
    with pytest.raises(RuntimeError, match="set_num_threads expects a positive") as caught:
        train(plan, total_steps=96)
    assert "in torch_threads" in str(caught.value.__cause__)
    assert multiprocessing.active_children() == []


def test_a_killed_learner_is_named_with_its_exit_code_and_the_run_is_saved(tmp_path):
    with pytest.raises(RunError, match=r"learner process was killed by SIGKILL \(exit code -9\)"):
        train(
            overlapped(),
            total_steps=320,
            run_dir=tmp_path,
            callbacks=[Then(3, lambda: signal_learner(signal.SIGKILL))],
        )
    # The fourth update was under way; it may have been through.
    assert load_checkpoint(tmp_path).progress.iteration in (3, 4)


def test_a_learner_that_hangs_is_ended(tmp_path):
    with pytest.raises(RunError, match="learner process has not answered for 3 s"):
        train(
            overlapped(),
            total_steps=320,
            run_dir=tmp_path,
            worker_deadline_s=3.0,
            callbacks=[Then(3, lambda: signal_learner(signal.SIGSTOP))],
        )
    # The fourth update was under way; it may have been through.
    assert load_checkpoint(tmp_path).progress.iteration in (3, 4)
    assert multiprocessing.active_children() == []


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from autoplace.train import Callback, saving, train
from tests.train.plans import make_plan

saving.CHECKPOINT_INTERVAL_S, saving._CHECKPOINT_SHARE = 0.0, 1.0

class Say(Callback):
    def on_iteration(self, report):
        print(report.iteration, flush=True)

# No `if __name__ == "__main__"`: the learner does not run this file again.
train(make_plan(scheme="double-buffer"), total_steps=10**7, run_dir={folder!r}, callbacks=[Say()])
"""


def kill_at_random(tmp_path, who, delay_s):
    shm = Path("/dev/shm")
    before = set(shm.iterdir()) if shm.exists() else set()
    script = tmp_path / "script.py"
    folder = tmp_path / "run"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[2]), folder=str(folder)))
    run = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    with run:
        try:
            assert run.stdout.readline().strip() == "1"
            family = psutil.Process(run.pid).children(recursive=True)
            time.sleep(delay_s)
            if who == "parent":
                run.kill()
            else:
                next(p for p in family if "spawn_main" in " ".join(p.cmdline())).kill()
            run.wait(30)
        finally:
            run.kill()
    gone, alive = psutil.wait_procs(family, timeout=10)
    assert not alive and len(gone) >= 1
    assert not shm.exists() or set(shm.iterdir()) <= before
    saved = load_checkpoint(folder)
    assert saved.progress.iteration >= 1
    return folder, saved.progress.iteration


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("who", ["parent", "learner"])
def test_nothing_is_left_when_either_process_is_killed(tmp_path, who):
    folder, iteration = kill_at_random(tmp_path, who, 0.2)
    plan = overlapped()
    steps = 32 * (iteration + 2)
    assert train(plan, total_steps=steps, run_dir=folder, resume=True).env_steps == steps


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("moment", range(20))
def test_nothing_is_left_when_killed_at_a_random_moment(tmp_path, moment):
    chance = random.Random(moment)
    kill_at_random(tmp_path, chance.choice(["parent", "learner"]), chance.uniform(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cartpole_holds_475_after_100000_steps(seed):
    plain = Hyperparameters()
    names = ("num_envs", "rollout_steps", "epochs", "hidden_sizes")
    sizes = {name: getattr(plain, name) for name in names}
    listener = Listener()
    train(overlapped(rows=256, **sizes), total_steps=100_000, seed=seed, callbacks=[listener])
    assert evaluate(listener.policy, episodes=20).mean_return >= 475


def test_a_checkpoint_of_every_iteration_holds_the_weights_of_that_iteration(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "CHECKPOINT_INTERVAL_S", 0.0)
    monkeypatch.setattr(saving, "_CHECKPOINT_SHARE", math.inf)
    watching = Watching()

    class Compare(Callback):
        def on_iteration(self, report):
            saved = load_checkpoint(tmp_path)
            assert saved.progress.iteration == report.iteration
            assert torch.equal(saved.build_network().flat, watching.weights[-1])

    train(overlapped(), total_steps=160, run_dir=tmp_path, callbacks=[watching, Compare()])
