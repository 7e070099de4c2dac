"""Samplers and learner in processes of their own."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium as gym
import psutil
import pytest
import torch

from autoplace.envs import spawn_seeds
from autoplace.errors import EnvError
from autoplace.presets import preset_hyperparameters
from autoplace.processes import RemoteTraceback
from autoplace.train import Callback, StopRequested, evaluate, train
from autoplace.train.checkpoint import load_checkpoint
from autoplace.train.local_learner import LocalLearner
from autoplace.workload import Hyperparameters
from tests.envs.toys import Counter, register
from tests.train.lagged import simulate
from tests.train.plans import Listener, make_plan

ROOT = Path(__file__).parents[2]
posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


def planned(env="CartPole-v1", *, workers=2, lag=1, **options):
    return make_plan(env, scheme="async", workers=workers, lag=lag, **options)


class Watching(Listener):
    """Does something after the third iteration."""

    def __init__(self, action=lambda: None):
        super().__init__()
        self.action = action

    def on_iteration(self, report):
        super().on_iteration(report)
        if report.iteration == 3:
            self.action()


def stop():
    raise StopRequested


def child(name):
    return next(p for p in multiprocessing.active_children() if p.name == f"autoplace {name}")


def send(number, name):
    return lambda: os.kill(child(name).pid, number)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("env", [pytest.param("CartPole-v1", marks=SLOW), "Pendulum-v1"])
def test_two_samplers_and_a_learner_compute_the_lagged_algorithm(env):
    plan = planned(env, normalize_rewards=True, entropy_coef=0.01)
    listener = Listener()
    result = train(plan, total_steps=160, callbacks=[listener])
    assert multiprocessing.active_children() == []
    assert result.iterations == 5 and result.env_steps == 160
    assert [r.max_policy_lag for r in listener.reports] == [0, 1, 1, 1, 1]
    torch.testing.assert_close(
        listener.flat, simulate(plan, num_iterations=5), atol=1e-5, rtol=1e-5
    )
    assert {key for key in result.stage_s if key[1] == "sampler"} == {
        (name, "sampler") for name in ("policy_step", "env_step", "handoff", "wait")
    }
    if env == "CartPole-v1":  # with a bound of 1, a seed repeats to the bit
        again = Listener()
        train(plan, total_steps=160, callbacks=[again])
        assert torch.equal(again.flat, listener.flat)


@pytest.mark.parametrize("env", [pytest.param("CartPole-v1", marks=SLOW), "Pendulum-v1"])
def test_a_sampler_without_torch_computes_what_one_in_the_runs_process_does(env):
    lock, found = threading.Lock(), []
    bound = register("Bound", lambda: (gym.make(env).unwrapped, lock)[0])  # crosses to no process
    free = register("Free", lambda: gym.make(env).unwrapped)
    for where, other in ((bound, "learner"), (free, "sampler 0")):
        listener, seen = Listener(), []
        listener.on_iteration = lambda report, seen=seen: seen.append(children())
        plan = make_plan(where, scheme="double-buffer", engine="numpy", normalize_observations=True)
        result = train(plan, total_steps=160, callbacks=[listener])
        assert [v.dropped_because for v in result.engines] == [None, None]
        assert seen[0] == [f"autoplace {other}"]
        found.append(listener.flat)
    assert torch.equal(*found)


def children():
    return [process.name for process in multiprocessing.active_children()]


class Facts(Counter):
    """Writes down what a sampler process is like, and breaks in the environment of one seed."""

    def __init__(self, file, breaks_at):
        super().__init__()
        self.file, self.breaks_at, self.breaks = file, breaks_at, False

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.breaks = seed == self.breaks_at
            process = psutil.Process()
            facts = {
                "pid": process.pid,
                "forked": hasattr(sys, "of_the_parent"),
                "threads": torch.get_num_threads(),
                "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
                "accelerator": torch.accelerator.is_available(),
                "open": [f.path for f in process.open_files() if f.path.startswith("/dev/nvidia")],
            }
            with open(self.file, "a") as file:
                file.write(json.dumps(facts) + "\n")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.breaks and self.total_steps == 40:
            raise ZeroDivisionError("what it says")
        return super().step(action)


def test_samplers_use_one_thread_and_no_device_and_their_errors_arrive_with_a_traceback(
    tmp_path, monkeypatch
):
    # Symptom: "Cannot re-initialize CUDA in forked subprocess".
    monkeypatch.setattr(sys, "of_the_parent", True, raising=False)
    file = tmp_path / "facts"
    seeds = spawn_seeds(0, 4)
    env = register("Facts", lambda: Facts(file, breaks_at=seeds[3]))
    with pytest.raises(EnvError, match="environment 3, vector step 41") as caught:
        train(planned(env, num_envs=4), total_steps=6400, run_dir=tmp_path / "run")
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert 'raise ZeroDivisionError("what it says")' in str(caught.value.__cause__)
    assert multiprocessing.active_children() == []
    # Steps 0 to 31 of that environment are in the first two rollouts, step 40 is in the third.
    assert load_checkpoint(tmp_path / "run").progress.iteration >= 1
    facts = [json.loads(line) for line in file.read_text().splitlines()]
    pids = [row.pop("pid") for row in facts]
    assert len(pids) == 4 and len(set(pids)) == 2 and os.getpid() not in pids
    expected = {"forked": False, "threads": 1, "devices": "", "accelerator": False, "open": []}
    assert facts == [expected] * 4


@posix
def test_a_sampler_that_is_killed_is_named_and_the_run_is_saved(tmp_path):
    watching = Watching(send(signal.SIGKILL, "sampler 1"))
    message = r"sampler process 1 \(environments 1\) was killed by SIGKILL"
    with pytest.raises(EnvError, match=message):
        train(planned(), total_steps=10**6, run_dir=tmp_path, callbacks=[watching])
    assert load_checkpoint(tmp_path).progress.iteration >= 3
    assert multiprocessing.active_children() == []


@pytest.mark.slow
@posix
def test_a_sampler_that_hangs_is_ended_and_named(tmp_path):
    watching = Watching(send(signal.SIGSTOP, "sampler 0"))
    with pytest.raises(EnvError, match=r"sampler process 0 \(environments 0\) has not answered"):
        train(
            planned(),
            total_steps=10**6,
            run_dir=tmp_path,
            callbacks=[watching],
            worker_deadline_s=3.0,
        )
    assert load_checkpoint(tmp_path).progress.iteration >= 3
    assert multiprocessing.active_children() == []


@posix
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=SLOW)])
def test_a_lost_sampler_is_restarted_and_only_its_first_row_is_no_transition(how, caplog):
    """Environment 1 is the second sampler's; every fifth step ends an episode."""
    env = register("EndsAfterFive", lambda: Counter(length=5))
    watching = Watching(send(how, "sampler 1"))
    result = train(
        planned(env),
        total_steps=8 * 32,
        callbacks=[watching],
        restart_workers=True,
        worker_deadline_s=3.0,
    )
    assert "sampler process 1 (environments 1)" in caplog.text
    assert "it is restarted, and its environments begin new episodes" in caplog.text
    assert result.worker_restarts == 1 and result.iterations == 8
    rows = [report.rows for report in watching.reports]
    assert sorted(rows) == [31, *[32] * 7] and rows.index(31) >= 3
    assert max(report.max_policy_lag for report in watching.reports) == 1
    # 16 steps a rollout: 128 of environment 0, some of them and then the rest of environment 1.
    ended = [episode for report in watching.reports for episode in report.episodes]
    assert {(episode.length, episode.episode_return) for episode in ended} == {(5, 15.0)}
    before = 16 * rows.index(31)
    counts = [sum(episode.env == index for episode in ended) for index in (0, 1)]
    assert counts == [128 // 5, before // 5 + (128 - before - 1) // 5]
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_sampler_that_is_lost_again_at_once_ends_the_run(tmp_path):
    def observe(plain, total_steps):
        if total_steps == 5:
            os._exit(3)
        return plain

    message = r"ended with exit code 3.*; it had been restarted and has completed no part"
    with pytest.raises(EnvError, match=message):
        env = register("Exits", lambda: Counter(observe=observe))
        train(planned(env), total_steps=320, run_dir=tmp_path, restart_workers=True)
    assert multiprocessing.active_children() == []


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 2, 3])
def test_the_lag_that_is_measured_is_within_the_bound_and_reaches_it_behind_a_slow_learner(lag):
    listener = Listener()
    train(planned(lag=lag, epochs=100), total_steps=32 * 12, callbacks=[listener])
    found = [r.max_policy_lag for r in listener.reports]
    assert max(found) == lag and found[-4:] == [lag] * 4
    env = register("Dawdles", lambda: Counter(observe=dawdle))
    listener = Listener()
    train(planned(env, lag=lag, epochs=1), total_steps=32 * 12, callbacks=[listener])
    found = [r.policy_lag for r in listener.reports]
    # Seldom may the system let a learner wait for as long as a sampler takes.
    assert found[0] == 0 and max(found) <= lag and sorted(found)[6] == 1


def dawdle(plain, total_steps):
    time.sleep(0.01)
    return plain


@pytest.mark.slow
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_rollouts_of_mixed_age_compute_the_lagged_algorithm(env, monkeypatch):
    versions = []
    hand_over = LocalLearner.hand_over

    def spy(self, *args, **options):
        versions.append(options["versions"])
        hand_over(self, *args, **options)

    monkeypatch.setattr(LocalLearner, "hand_over", spy)
    listener = Listener()
    plan = planned(env, lag=3, epochs=5, num_envs=4, normalize_rewards=True)
    train(plan, total_steps=64 * 12, callbacks=[listener])
    reference = simulate(plan, num_iterations=12, versions=versions)
    torch.testing.assert_close(listener.flat, reference, atol=1e-4, rtol=1e-4)


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from autoplace.train import Callback, saving, train
from tests.train.plans import make_plan

saving.CHECKPOINT_INTERVAL_S, saving._CHECKPOINT_SHARE = 0.0, 1.0

class Say(Callback):
    def on_iteration(self, report):
        print(report.iteration, flush=True)

# No `if __name__ == "__main__"`: nobody runs this file again.
plan = make_plan(scheme="async", workers=2, lag=2)
train(plan, total_steps=10**7, run_dir={folder!r}, callbacks=[Say()])
"""


def kill_at_random(tmp_path, who, delay_s):
    """Kill one process of a run; where it was saved, and how far it had come."""
    shm = Path("/dev/shm")
    before = set(shm.iterdir()) if shm.exists() else set()
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT.format(root=str(ROOT), folder=str(folder)))
    run = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with run:
        try:
            assert run.stdout.readline().strip() == "1"
            parent = psutil.Process(run.pid)
            family = parent.children(recursive=True)
            spawned = [p for p in family if "spawn_main" in " ".join(p.cmdline())]
            assert len(spawned) == 2  # the samplers; the run itself learns
            victims = {"parent": parent, "sampler": spawned[1]}
            time.sleep(delay_s)
            victims[who].kill()
            _, errors = run.communicate(timeout=30)
        finally:
            run.kill()
    if who != "parent":
        assert run.returncode == 1 and "sampler process" in errors and "SIGKILL" in errors, errors
    gone, alive = psutil.wait_procs(family, timeout=10)
    assert not alive and len(gone) == len(family)
    assert not shm.exists() or set(shm.iterdir()) <= before
    saved = load_checkpoint(folder)
    assert saved.progress.iteration >= 1
    return folder, saved.progress.iteration


@pytest.mark.slow
@posix
@pytest.mark.parametrize("moment", range(20))
def test_nothing_is_left_when_killed_at_a_random_moment(tmp_path, moment):
    chance = random.Random(moment)
    who = ("parent", "sampler")[moment % 2]
    folder, iteration = kill_at_random(tmp_path, who, chance.uniform(0, 1))
    steps = 32 * (iteration + 2)
    assert train(planned(), total_steps=steps, run_dir=folder, resume=True).env_steps == steps


def test_sigint_drops_what_is_in_flight_and_saves_the_rest(tmp_path):
    watching = Watching(lambda: os.kill(os.getpid(), signal.SIGINT))
    result = train(planned(workers=1), total_steps=10**6, run_dir=tmp_path, callbacks=[watching])
    assert result.interrupted and result.env_steps == 32 * result.iterations
    assert load_checkpoint(tmp_path).progress.iteration == result.iterations <= 4
    assert multiprocessing.active_children() == []


class Memory(Callback):
    """Resident bytes of the whole process tree, every two seconds."""

    def __init__(self):
        self.samples = []  # (seconds, env steps, bytes)
        self.start_s = time.monotonic()

    def on_iteration(self, report):
        elapsed_s = time.monotonic() - self.start_s
        if self.samples and elapsed_s - self.samples[-1][0] < 2.0:
            return
        tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
        total = sum(process.memory_info().rss for process in tree)
        self.samples.append((elapsed_s, report.env_steps, total))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_grows_by_less_than_1_percent_over_5_million_steps(tmp_path):
    memory, total_steps = Memory(), 5_000_000
    plan = planned(workers=1, rows=256, **defaults())
    train(plan, total_steps=total_steps, run_dir=tmp_path, callbacks=[memory])
    # After the first minute, or after a third of the steps where they take less than three.
    warm = [n for s, steps, n in memory.samples if s > 60 or steps > total_steps / 3]
    growth = max(warm) / warm[0] - 1
    print(f"{memory.samples[-1][0]:.0f} s, {warm[0] / 1e6:.1f} MB, grew by {growth:.2%}")
    assert len(warm) > 10 and growth < 0.01


def defaults(**changes):
    """Every hyperparameter at its default, but ``changes``."""
    plain = Hyperparameters()
    names = ("num_envs", "rollout_steps", "epochs", "hidden_sizes")
    return {**{name: getattr(plain, name) for name in names}, **changes}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cartpole_holds_475_after_100000_steps(seed):
    listener = Listener()
    plan = planned(rows=256, **defaults())
    train(plan, total_steps=100_000, seed=seed, callbacks=[listener])
    mean_return = evaluate(listener.policy, episodes=20).mean_return
    print(f"CartPole-v1, seed {seed}: {mean_return:.1f}")
    assert mean_return >= 475


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pendulum_reaches_minus_250_after_200000_steps(seed):
    preset = preset_hyperparameters("auto", "Pendulum-v1")
    rows = preset.pop("minibatch_rows")
    listener = Listener()
    plan = planned("Pendulum-v1", rows=rows, **defaults(**preset))
    train(plan, total_steps=200_000, seed=seed, callbacks=[listener])
    mean_return = evaluate(listener.policy, episodes=100).mean_return
    print(f"Pendulum-v1, seed {seed}: {mean_return:.1f}")
    assert mean_return >= -250
