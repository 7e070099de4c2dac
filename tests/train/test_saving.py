"""Checkpoints: which there are, and that no accident costs the last good one."""

import errno
import logging
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from autoplace import files
from autoplace.errors import RunError
from autoplace.store import create_run_dir
from autoplace.train import Callback, evaluate, load_policy, saving, train
from autoplace.train.checkpoint import load_checkpoint
from tests.envs.toys import Counter, register
from tests.train.plans import Listener, make_plan

ROOT = Path(__file__).parents[2]


@pytest.fixture
def at_once(monkeypatch):
    """Saves after every iteration."""
    monkeypatch.setattr(saving, "CHECKPOINT_INTERVAL_S", 0.0)
    monkeypatch.setattr(saving, "_CHECKPOINT_SHARE", float("inf"))


class Weights(Listener):
    """Keeps the weights after each iteration, by env steps."""

    def on_iteration(self, report):
        super().on_iteration(report)
        self.by_step = {**getattr(self, "by_step", {}), report.env_steps: self.flat.clone()}


def flat_of(folder, name):
    return load_checkpoint(folder, name).build_network().flat


def paying(name, reward):
    """An environment whose episodes of 4 steps pay what ``reward`` says of the steps so far."""
    return register(name, lambda: Counter(length=4, reward=reward))


# 2 environments, 16 steps each an iteration: 8 episodes of 4 steps end in every iteration, and the
# window of 100 is full after 13 of them.


def test_best_is_the_highest_mean_return_once_the_window_is_full(tmp_path):
    env = paying("Peaks", lambda step: float(16 * 14 < step <= 16 * 17))  # iterations 15 to 17
    weights = Weights()
    train(make_plan(env), total_steps=32 * 40, run_dir=tmp_path, callbacks=[weights])
    means = {r.env_steps: r.mean_return for r in weights.reports if r.iteration > 13}
    peak = max(means, key=lambda steps: (means[steps], -steps))  # the first of equals
    assert 32 * 15 <= peak < 32 * 40
    best = load_checkpoint(tmp_path, "best")
    assert best.progress.env_steps == peak
    assert torch.equal(flat_of(tmp_path, "best"), weights.by_step[peak])
    assert torch.equal(flat_of(tmp_path, "latest"), weights.by_step[32 * 40])
    assert load_policy(tmp_path, checkpoint="best").env_steps == peak
    assert evaluate(tmp_path, episodes=1, checkpoint="best").env_steps == peak


def test_while_the_window_fills_a_mean_over_more_episodes_is_better(tmp_path):
    env = paying("Falls", lambda step: 1.0 if step <= 16 else 0.0)  # the first iteration pays
    train(make_plan(env), total_steps=32 * 5, run_dir=tmp_path)
    assert load_checkpoint(tmp_path, "best").progress.iteration == 5


def test_a_resumed_run_keeps_a_best_that_it_does_not_reach_again(tmp_path):
    env = paying("PaysEarly", lambda step: 1.0)
    plan = make_plan(env)
    train(plan, total_steps=32 * 14, run_dir=tmp_path)
    best = load_checkpoint(tmp_path, "best").progress.env_steps
    paying("PaysEarly", lambda step: 0.0)  # the same environment pays nothing from now on
    train(plan, total_steps=32 * 20, run_dir=tmp_path, resume=True)
    assert load_checkpoint(tmp_path).progress.env_steps == 32 * 20
    assert load_checkpoint(tmp_path, "best").progress.env_steps == best


def test_no_best_without_an_episode_and_the_message_names_what_there_is(tmp_path):
    env = register("EndlessSaved", lambda: Counter(length=10**9))
    train(make_plan(env), total_steps=160, run_dir=tmp_path, checkpoint_every=64)
    with pytest.raises(RunError, match="holds no checkpoint 'best': name one of latest, 64, 128"):
        load_policy(tmp_path, checkpoint="best")


def test_one_is_kept_at_the_end_of_each_iteration_that_reaches_the_next_n(tmp_path):
    weights = Weights()
    # 32 rows an iteration: 50, 100 and 150 are reached with 64, 128 and 160.
    train(make_plan(), total_steps=160, run_dir=tmp_path, checkpoint_every=50, callbacks=[weights])
    kept = {file.stem.removeprefix("checkpoint-") for file in tmp_path.glob("checkpoint-*.pt")}
    assert kept == {"latest", "best", "64", "128", "160"}
    for name in ("64", "128", "160"):
        assert torch.equal(flat_of(tmp_path, name), weights.by_step[int(name)])


def test_a_damaged_kept_checkpoint_is_one_clear_line(tmp_path):
    train(make_plan(), total_steps=64, run_dir=tmp_path, checkpoint_every=64)
    (tmp_path / "checkpoint-64.pt").write_bytes(b"rubbish")
    with pytest.raises(RunError, match=r"checkpoint-64.pt cannot be read: take another"):
        load_policy(tmp_path, checkpoint="64")


# --------------------------------------------------------------------------------------------------
# A disk that is full


class FullDisk(Callback):
    """A disk that fills up after one iteration, and has room again after another."""

    def __init__(self, monkeypatch, full_after, room_after=10**9):
        self._monkeypatch, self._full, self._room = monkeypatch, full_after, room_after

    def on_iteration(self, report):
        if report.iteration == self._full:
            self._monkeypatch.setattr(files.os, "fsync", _no_space)
        if report.iteration == self._room:
            self._monkeypatch.undo()
            self._monkeypatch.setattr(saving, "CHECKPOINT_INTERVAL_S", 0.0)


def _no_space(descriptor):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_said_once_and_the_run_ends_with_the_checkpoint_from_before_it(
    tmp_path, monkeypatch, caplog, at_once
):
    with pytest.raises(RunError, match=r"No space left on device.* make room or choose another"):
        train(make_plan(), total_steps=160, run_dir=tmp_path, callbacks=[FullDisk(monkeypatch, 2)])
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(said) == 1 and "training goes on, with what was saved before" in said[0]
    assert load_checkpoint(tmp_path).progress.iteration == 2
    assert not list(tmp_path.glob("*.tmp"))


def test_a_run_saves_again_once_there_is_room(tmp_path, monkeypatch, at_once):
    disk = FullDisk(monkeypatch, 2, room_after=3)
    assert train(make_plan(), total_steps=160, run_dir=tmp_path, callbacks=[disk]).iterations == 5
    assert load_checkpoint(tmp_path).progress.iteration == 5


FILLS = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from autoplace.errors import RunError
from autoplace.train import Callback, saving, train
from tests.train.plans import make_plan

saving.CHECKPOINT_INTERVAL_S, saving._CHECKPOINT_SHARE = 0.0, 1.0
folder = Path({folder!r})

class Fill(Callback):
    def on_iteration(self, report):
        if report.iteration == 2:
            with open(folder / "filler", "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass

try:
    train(make_plan(), total_steps=3200, run_dir=folder / "run", callbacks=[Fill()])
except RunError as fault:
    print(fault)
"""


def test_a_disk_that_is_truly_full_costs_no_checkpoint_and_shows_no_traceback(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("mount is of Linux")
    if mounted.returncode:
        pytest.skip("a small file system can only be made by root")
    try:
        script = FILLS.format(root=str(ROOT), folder=str(folder))
        run = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        assert "No space left on device, 0 MB free there: make room" in run.stdout
        assert len(run.stdout.splitlines()) == 1
        assert "Traceback" not in run.stderr and "Exception" not in run.stderr
        warnings = run.stderr.splitlines()  # each once: checkpoints, events, perhaps episodes
        assert all("training goes on" in warning for warning in warnings), warnings
        assert len({warning.partition(":")[0] for warning in warnings}) == len(warnings) >= 2
        assert load_checkpoint(folder / "run").progress.iteration == 2
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# --------------------------------------------------------------------------------------------------
# A kill in the middle of a save

SAVES = """
import sys
sys.path.insert(0, {root!r})
import torch
from autoplace.store import RunDir
from autoplace.train.checkpoint import Progress
from autoplace.train.learner import Learner
from autoplace.train.saving import Saver
from autoplace.train.stage_timer import StageTimer
from autoplace.ppo.network import ActorCritic
from tests.train.plans import make_plan
from pathlib import Path

plan = make_plan(hidden_sizes=(512, 512))
hyper = plan.workload.hyperparameters
network = ActorCritic(plan.workload.network, normalize_observations=True)
learner = Learner(network, hyper, minibatch_rows=16, device="cpu", threads=1, timer=StageTimer())
with RunDir(Path({folder!r})) as run_dir:
    start = Progress(total_steps=10**9, seed=0)
    saver = Saver(run_dir, plan.workload, None, start)
    for iteration in range({first}, 10**9):
        network.flat.fill_(iteration)
        saver.save(learner, Progress(total_steps=10**9, seed=0, iteration=iteration))
        print(iteration, flush=True)  # this one is safe from now on
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)  # twenty processes that import torch, on a machine that may be busy
def test_the_last_good_checkpoint_loads_after_each_of_20_kills_during_saves(tmp_path):
    chance = random.Random(0)
    create_run_dir(tmp_path, env_id="CartPole-v1", seed=0).close()
    last = 0
    for _ in range(20):
        script = SAVES.format(root=str(ROOT), folder=str(tmp_path), first=last + 1)
        with subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
        ) as run:
            assert int(run.stdout.readline()) == last + 1
            time.sleep(chance.uniform(0, 0.2))
            run.kill()
            said = [int(line) for line in run.stdout if line.endswith("\n")]
        last = said[-1] if said else last + 1
        saved = load_checkpoint(tmp_path)
        assert saved.progress.iteration in (last, last + 1)  # the save that was not yet told of
        for parameter in saved.build_network().parameters():
            assert (parameter == saved.progress.iteration).all()
        last = saved.progress.iteration
