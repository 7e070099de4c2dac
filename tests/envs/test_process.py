"""Environments in worker processes: the same transitions, and every way in which it can end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import psutil
import pytest

from autoplace.envs import (
    BACKENDS,
    ProcessVectorEnv,
    Restarts,
    inspect_env,
    make_vector_env,
    spawn_seeds,
)
from autoplace.envs.workers import DEADLINE_S
from autoplace.errors import EnvError, UsageError
from autoplace.measure.envs import env_tasks
from autoplace.planner.backends import JOINED, SPREAD
from autoplace.processes import RemoteTraceback
from autoplace.workload import EnvSpec
from tests.envs.toys import Counter, register

ROOT = Path(__file__).parents[2]
ZEROS = np.zeros(4, np.int64)


class Faulty(gym.Env):
    """A Counter-like environment that misbehaves in one way, if it is number ``index``.

    It knows its number from its seed.
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, index=0, step=3, how="raise", where="step"):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.index, self.step_number, self.how, self.where = index, step, how, where
        self.number, self.steps, self.resets = -1, 0, 0
        if where == "constructor" and multiprocessing_child():
            self.misbehave()

    def misbehave(self):
        if self.how == "raise":
            raise ValueError("no wheels")
        if self.how == "hang":
            time.sleep(3600)
        if self.how == "exit":
            os._exit(137)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def reset(self, *, seed=None, options=None):
        self.number = self.number if seed is None else seed
        self.resets += 1
        if self.where == "reset" and self.number == self.index:
            self.misbehave()
        return np.array([self.number, 0], np.float32), {}

    def step(self, action):
        self.steps += 1
        observation = np.array([self.number, self.steps], np.float32)
        if self.where == "step" and self.number == self.index and self.steps == self.step_number:
            self.misbehave()
            observation[1] = np.nan
        return observation, 0.0, False, False, {}


def multiprocessing_child():
    import multiprocessing

    return multiprocessing.parent_process() is not None


def make(factory, *, num_envs=4, num_workers=2, **options):
    description = inspect_env(EnvSpec(id=register("Process", factory)))
    return ProcessVectorEnv(description, num_envs, num_workers=num_workers, **options)


def processes(envs):
    return [psutil.Process(pid) for pid in envs.workers.pids]


def wait_until(condition, limit_s=20.0):
    """Whether ``condition`` comes true before a generous limit."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


def gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def same_as_sync(env_id, *, steps, num_envs, **options):
    """Step both with the same seeds and actions; returns how many episodes ended."""
    description = inspect_env(EnvSpec(id=env_id))
    sync = make_vector_env(description, num_envs=num_envs)
    other = ProcessVectorEnv(description, num_envs, **options)
    seeds = spawn_seeds(3, num_envs)
    actions = description.actions.random(np.random.default_rng(0), steps, num_envs)
    ended = 0
    try:
        np.testing.assert_array_equal(sync.reset(seeds), other.reset(seeds))
        for row in actions:
            a, b = sync.step(row), other.step(row)
            np.testing.assert_array_equal(a.observations, b.observations)
            np.testing.assert_array_equal(a.rewards, b.rewards)
            np.testing.assert_array_equal(a.terminated, b.terminated)
            np.testing.assert_array_equal(a.truncated, b.truncated)
            assert list(a.ended) == list(b.ended) and b.valid is None
            np.testing.assert_array_equal(a.final_observations, b.final_observations)
            ended += len(a.ended)
        # A second reset starts the same episodes again.
        np.testing.assert_array_equal(sync.reset(seeds), other.reset(seeds))
    finally:
        other.close()
    return ended


@pytest.mark.parametrize(
    ("env_id", "options"),
    [
        ("CartPole-v1", {"num_workers": 2}),
        ("CartPole-v1", {"num_workers": 3, "num_groups": 2}),
        ("Pendulum-v1", {"num_workers": 2}),
        ("CartPole-v1", {"num_workers": 3, "joins": True}),
    ],
)
def test_trajectories_are_those_of_sync_to_the_bit(env_id, options):
    assert same_as_sync(env_id, steps=220, num_envs=7, **options) >= 7


def test_threads_run_the_same_worker():
    assert same_as_sync("CartPole-v1", steps=60, num_envs=3, num_workers=2, use_threads=True) > 0
    assert not [t for t in threading.enumerate() if t.name.startswith("environment worker")]


def test_environments_are_spread_evenly_and_each_has_its_own_seed():
    envs = make(Faulty, num_envs=7, num_workers=3)
    try:
        assert envs.workers.names == [
            "environment worker 0 (environments 0-1)",
            "environment worker 1 (environments 2-3)",
            "environment worker 2 (environments 4-6)",
        ]
        assert envs.reset(range(10, 17))[:, 0].tolist() == list(range(10, 17))
        first = make_vector_env(
            inspect_env(EnvSpec(id="CartPole-v1")), num_envs=6, backend="process", num_workers=2
        )
        assert len({tuple(row) for row in first.reset(spawn_seeds(1, 6)).tolist()}) == 6
        first.close()
    finally:
        envs.close()


def test_the_caller_is_one_of_the_workers_where_it_joins():
    envs = make(lambda: Faulty(index=0), num_envs=5, num_workers=2, joins=True)
    alive = processes(envs)
    assert len(alive) == 1 and envs.num_workers == 2
    assert envs.workers.names == ["environment worker 0 (environments 2-4)"]
    assert envs.reset(range(10, 15))[:, 0].tolist() == list(range(10, 15))
    envs.step(np.zeros(5, np.int64))
    envs.reset(range(5))
    with pytest.raises(EnvError, match=r"ValueError from .*, environment 0, vector step 2: no w"):
        for _ in range(3):
            envs.step(np.zeros(5, np.int64))
    assert all(map(gone, alive)), "a worker outlives the failure of the caller's share"


def test_a_worker_of_a_caller_that_joins_is_started_anew():
    restarts = Restarts(allowed=True)
    envs = make(Counter, num_envs=4, num_workers=2, joins=True, restarts=restarts)
    try:
        envs.reset(range(4))
        envs.step(ZEROS)
        (worker,) = processes(envs)
        worker.kill()
        step = envs.step(ZEROS)
        assert restarts.count == 1
        assert step.valid.tolist() == [True, True, False, False]
        assert envs.step(ZEROS).valid is None
    finally:
        envs.close()


def test_the_planner_knows_the_backends_with_workers_by_name():
    assert {entry.name for entry in BACKENDS if entry.joins} == {JOINED}
    assert {entry.name for entry in BACKENDS if entry.has_groups} == {SPREAD}
    tasks = env_tasks(EnvSpec(id="CartPole-v1"), (1, 8), (1, 2, 4))
    assert {t.workers for t in tasks if t.backend == JOINED} == {2, 4}
    assert {t.workers for t in tasks if t.backend == SPREAD} == {1, 2, 4}


def test_half_of_the_environments_step_while_the_others_wait():
    envs = make(Faulty, num_envs=4, num_workers=2, num_groups=2, use_threads=True)
    envs.reset(range(4))
    assert envs.groups == (slice(0, 2), slice(2, 4))
    envs.step_async(ZEROS[:2], 0)
    envs.step_async(ZEROS[2:], 1)
    first = envs.step_wait(0)
    envs.step_async(ZEROS[:2], 0)  # the first half goes on while the second is looked at
    second = envs.step_wait(1)
    assert second.observations.tolist() == [[2, 1], [3, 1]]
    assert envs.step_wait(0).observations.tolist() == [[0, 2], [1, 2]]
    assert np.shares_memory(first.observations, envs.observations)
    envs.close()


def test_there_are_no_more_workers_than_environments():
    envs = make(Counter, num_envs=2, num_workers=5, use_threads=True)
    assert envs.num_workers == 2
    envs.close()
    with pytest.raises(UsageError, match="--num-workers must be at least 1, got 0"):
        make(Counter, num_workers=0)


def test_a_worker_is_no_fork_imports_no_torch_has_one_thread_and_sees_no_device(monkeypatch):
    # Symptom: "Cannot re-initialize CUDA in forked subprocess".
    class Tells(Counter):
        def reset(self, *, seed=None, options=None):
            import os
            import sys

            told = [
                "torch" in sys.modules or hasattr(sys, "of_the_parent"),
                os.environ["OMP_NUM_THREADS"] == "1" and os.environ["CUDA_VISIBLE_DEVICES"] == "",
            ]
            return np.array(told, np.float64), {}

    monkeypatch.setattr(sys, "of_the_parent", True, raising=False)
    before = dict(os.environ)
    envs = make(Tells, num_workers=1)
    assert envs.reset(range(4)).tolist() == [[0, 1]] * 4
    envs.close()
    assert dict(os.environ) == before


def test_factories_that_pickle_cannot_send_are_sent_and_what_nothing_can_is_named(caplog):
    length = 2
    envs = make(lambda: Counter(length=length))  # a closure in a test function
    envs.reset(range(4))
    envs.step(ZEROS)
    assert list(envs.step(ZEROS).ended) == [0, 1, 2, 3]
    envs.close()

    lock = threading.Lock()

    def unsendable():
        assert lock
        return Counter()

    env_id = register("Unsendable", unsendable)
    instead = make_vector_env(
        inspect_env(EnvSpec(id=env_id)), num_envs=2, backend="process", num_workers=2
    )
    assert instead.reset([0, 1]).shape == (2, 2)
    assert f"{env_id} cannot be sent to a worker process" in caplog.text
    assert "it runs in this process instead" in caplog.text


# --------------------------------------------------------------------------------------------------
# What goes wrong in a worker


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("step", r"ValueError from AutoplaceTest/Process-v0, environment 2, vector step 3: no whe"),
        ("reset", r"ValueError from .*, environment 2, vector step 0: no wheels"),
        ("constructor", r"AutoplaceTest/Process-v0 cannot be made: ValueError: no wheels"),
    ],
)
def test_an_exception_arrives_with_its_own_traceback_and_environment(where, message):
    with pytest.raises(EnvError, match=message) as caught:
        envs = make(lambda: Faulty(index=2, where=where))
        alive = processes(envs)
        envs.reset(range(4))
        for _ in range(3):
            envs.step(ZEROS)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "in misbehave" in str(caught.value.__cause__)
    assert 'raise ValueError("no wheels")' in str(caught.value.__cause__)
    if where != "constructor":
        assert all(map(gone, alive)), "a worker outlives the failure of another"


def test_a_number_that_is_not_finite_is_named_with_its_environment():
    envs = make(lambda: Faulty(index=3, how="nan"))
    envs.reset(range(4))
    envs.step(ZEROS)
    envs.step(ZEROS)
    with pytest.raises(EnvError, match=r"finite, got nan from .*, environment 3, vector step 3"):
        envs.step(ZEROS)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exit", r"environment worker 1 \(environments 2-3\) ended with exit code 137: .*memory"),
        ("kill", r"environment worker 1 .* was killed by SIGKILL \(exit code -9\): .*memory"),
    ],
)
@pytest.mark.parametrize("where", ["step", "reset"])
def test_a_worker_that_dies_is_named_with_its_exit_code(how, message, where):
    envs = make(lambda: Faulty(index=2, how=how, where=where))
    alive = processes(envs)
    with pytest.raises(EnvError, match=message):
        envs.reset(range(4))
        for _ in range(3):
            envs.step(ZEROS)
    assert all(map(gone, alive))


def test_a_worker_that_hangs_is_named_and_killed():
    assert DEADLINE_S >= 60  # generous where nothing else is said
    envs = make(lambda: Faulty(index=0, how="hang"), deadline_s=0.5)
    alive = processes(envs)
    envs.reset(range(4))
    envs.step(ZEROS)
    envs.step(ZEROS)
    with pytest.raises(
        EnvError, match=r"environment worker 0 .*has not answered for 0.5 s \(process \d+, killed\)"
    ):
        envs.step(ZEROS)
    assert all(map(gone, alive))


def test_a_worker_killed_at_a_random_moment_is_noticed_at_once():
    rng = random.Random(0)
    for _ in range(3):
        envs = make(Counter, num_workers=2)
        victim, other = processes(envs)
        envs.reset(range(4))
        timer = threading.Timer(rng.uniform(0.0, 0.1), victim.kill)
        timer.start()
        with pytest.raises(EnvError, match=r"worker 0 .* was killed by SIGKILL"):
            while True:
                envs.step(ZEROS)
        timer.join()
        assert gone(victim) and gone(other)


def test_closing_ends_every_process_and_may_be_done_twice():
    envs = make(Faulty)
    alive = processes(envs)
    envs.reset(range(4))
    envs.step_async(ZEROS)  # and nobody waits for it
    envs.close()
    envs.close()
    assert all(map(gone, alive))
    with pytest.raises(EnvError, match="the environment workers have ended"):
        envs.reset(range(4))


def test_forgetting_to_close_leaves_no_process():
    envs = make(Faulty)
    alive = processes(envs)
    del envs
    assert wait_until(lambda: all(map(gone, alive)))


# --------------------------------------------------------------------------------------------------
# What happens to the trainer

SCRIPT = """
    import os, signal, sys, time
    import numpy as np
    import gymnasium as gym
    from autoplace.envs import inspect_env, make_vector_env, ProcessVectorEnv
    from autoplace.workload import EnvSpec

    # No `if __name__ == "__main__"`: a worker must not run this again.
    class Mine(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
        action_space = gym.spaces.Discrete(2)
        hang = False

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            while sys.argv[1] == "hang":
                pass
            return np.zeros(1, np.float32), 0.0, False, False, {}

    # Whoever started the tests in the background may have left it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gym.register("Mine-v0", entry_point=Mine)
    description = inspect_env(EnvSpec(id="Mine-v0"))
    envs = ProcessVectorEnv(description, 4, num_workers=2)
    envs.reset(range(4))
    print(*envs.workers.pids, flush=True)
    if sys.argv[1] == "leave":
        sys.exit(0)
    if sys.argv[1] == "raise":
        raise RuntimeError("mine")
    while True:
        envs.step(np.zeros(4, np.int64))
"""


def run_script(tmp_path, how):
    """A started trainer and its worker processes."""
    script = tmp_path / "mine.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(script), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return process, [psutil.Process(int(pid)) for pid in line.split()]


def shared_segments():
    folder = Path("/dev/shm")
    return {p.name for p in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.parametrize("how", ["step", "hang"])
def test_a_trainer_that_is_killed_leaves_no_process_and_no_shared_memory(tmp_path, how):
    before = shared_segments()
    process, workers = run_script(tmp_path, how)
    children = psutil.Process(process.pid).children(recursive=True)
    time.sleep(0.2)  # amid its steps
    process.kill()
    process.communicate()
    assert wait_until(lambda: all(gone(child) for child in [*workers, *children]))
    assert not {name for name in shared_segments() - before if str(process.pid) in name}


@pytest.mark.parametrize(("how", "code"), [("leave", 0), ("raise", 1)])
def test_a_script_that_never_closes_ends_by_itself(tmp_path, how, code):
    process, workers = run_script(tmp_path, how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code and ("RuntimeError: mine" in errors) == (how == "raise")
    assert wait_until(lambda: all(map(gone, workers)))


def test_ctrl_c_reaches_the_trainer_alone(tmp_path):
    process, workers = run_script(tmp_path, "step")
    for worker in workers:
        worker.send_signal(signal.SIGINT)
        worker.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert not any(map(gone, workers)) and process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors and errors.count("Traceback") == 1
    assert wait_until(lambda: all(map(gone, workers)))


@pytest.mark.slow
def test_forty_kills_at_random_moments_leave_nothing(tmp_path):
    rng = random.Random(1)
    before = shared_segments()
    for count in range(40):
        process, workers = run_script(tmp_path, "step")
        children = psutil.Process(process.pid).children(recursive=True)
        time.sleep(rng.uniform(0.0, 0.3))
        victim = rng.choice([psutil.Process(process.pid), *workers])
        victim.kill()
        _, errors = process.communicate(timeout=60)
        if victim.pid != process.pid:
            assert process.returncode == 1 and "was killed by SIGKILL" in errors, (count, errors)
        assert wait_until(lambda found=[*workers, *children]: all(map(gone, found)))
    assert shared_segments() <= before


@pytest.mark.parametrize(
    ("cpus", "num_workers", "joins", "stays_awake"),
    [
        (4, 2, False, True),
        (2, 2, False, False),  # the workers need both cores
        (2, 2, True, True),  # there is only one beside the caller
    ],
)
def test_who_waits_leaves_the_cores_to_the_workers(
    monkeypatch: pytest.MonkeyPatch, cpus: int, num_workers: int, joins: bool, stays_awake: bool
) -> None:
    looks: list[str] = []
    monkeypatch.setattr("autoplace.envs.process.usable_cpus", lambda: cpus)
    monkeypatch.setattr(
        "autoplace.envs.workers._yield_core", lambda: looks.append(threading.current_thread().name)
    )
    description = inspect_env(EnvSpec.make(register("Awake", Counter)))
    envs = ProcessVectorEnv(description, 4, num_workers=num_workers, joins=joins, use_threads=True)
    try:
        envs.reset([0, 1, 2, 3])
        looks.clear()
        for _ in range(50):
            envs.step(ZEROS)
    finally:
        envs.close()
    assert (threading.main_thread().name in looks) is stays_awake
