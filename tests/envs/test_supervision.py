"""Workers that are lost: named, and started anew where that is wanted."""

from __future__ import annotations

import logging
import os
import time

import psutil
import pytest

from autoplace.envs import Restarts, inspect_env, make_vector_env
from autoplace.envs.memory_watch import MemoryWatch, usable_memory
from autoplace.errors import EnvError
from autoplace.workload import EnvSpec
from tests.envs.test_process import ZEROS, Faulty, gone, make, processes
from tests.envs.toys import Counter, register

GIB = 2**30


# --------------------------------------------------------------------------------------------------
# Restarts


@pytest.mark.parametrize("how", ["exit", "kill", "hang"])
def test_a_lost_worker_is_restarted_and_only_its_rows_are_no_transitions(how, caplog):
    """Environments 2 and 3 are the second worker's; environment 2 misbehaves in its third step."""
    restarts = Restarts(allowed=True)
    envs = make(lambda: Faulty(index=2, how=how), deadline_s=1.0, restarts=restarts)
    first, second = processes(envs)
    envs.reset(range(4))
    for _ in range(2):
        assert envs.step(ZEROS).valid is None
    with caplog.at_level(logging.WARNING):
        step = envs.step(ZEROS)
    assert "environment worker 1 (environments 2-3)" in caplog.text
    assert "it is restarted, and its environments begin new episodes" in caplog.text
    assert step.valid.tolist() == [True, True, False, False]
    assert step.truncated.tolist() == [False, False, True, True]
    assert not step.terminated.any() and not step.rewards[2:].any()
    assert list(step.ended) == [] and len(step.final_observations) == 0
    assert step.observations[:2].tolist() == [[0, 3], [1, 3]]
    # New seeds, which neither of them had before, and steps that begin at 0.
    assert step.observations[2:, 1].tolist() == [0, 0]
    assert len({0.0, 1.0, 2.0, 3.0, *step.observations[2:, 0].tolist()}) == 6
    step = envs.step(ZEROS)
    assert step.valid is None and not step.truncated.any()
    assert step.observations[:, 1].tolist() == [4, 4, 1, 1]
    assert restarts.count == 1
    assert gone(second) and not gone(first) and processes(envs)[0] == first
    envs.close()


def test_in_two_halves_each_loses_the_step_that_was_under_way_or_comes_next():
    """Worker 1 has environment 1 of the first half and environment 3 of the second."""
    restarts = Restarts(allowed=True)
    make_env = lambda: Faulty(index=1, step=2, how="kill")  # noqa: E731 - sent to the workers
    envs = make(make_env, num_groups=2, restarts=restarts)
    envs.reset(range(4))
    for group in (0, 1):
        envs.step_async(ZEROS[:2], group)
    for group in (0, 1):
        assert envs.step_wait(group).valid is None
    envs.step_async(ZEROS[:2], 0)
    lost = envs.step_wait(0)
    assert lost.valid.tolist() == [True, False] and lost.truncated.tolist() == [False, True]
    assert lost.observations[:, 1].tolist() == [2, 0]
    # What the second half is about to act on is still what its last step led to.
    assert envs.observations[2:].tolist() == [[2, 1], [3, 1]]
    envs.step_async(ZEROS[:2], 1)
    lost = envs.step_wait(1)
    assert lost.valid.tolist() == [True, False] and lost.observations[:, 1].tolist() == [2, 0]
    # All at once, both halves: everything is a transition again.
    step = envs.step(ZEROS)
    assert step.valid is None and step.observations[:, 1].tolist() == [3, 1, 3, 1]
    assert restarts.count == 1
    envs.close()


def test_what_is_lost_amid_both_halves_is_lost_in_both():
    envs = make(
        lambda: Faulty(index=1, step=1, how="kill"),
        num_groups=2,
        restarts=Restarts(allowed=True),
    )
    envs.reset(range(4))
    step = envs.step(ZEROS)
    assert step.valid.tolist() == [True, False, True, False]
    assert step.observations[:, 1].tolist() == [1, 0, 1, 0]
    assert envs.step(ZEROS).valid is None
    envs.close()


def test_a_worker_that_is_lost_again_at_once_ends_the_run():
    class Dies(Counter):
        def step(self, action):
            os._exit(3)

    restarts = Restarts(allowed=True)
    envs = make(Dies, restarts=restarts)
    alive = processes(envs)
    envs.reset(range(4))
    with pytest.raises(
        EnvError, match=r"exit code 3: .*; it had been restarted and has not completed a step since"
    ):
        for _ in range(3):
            envs.step(ZEROS)
    assert restarts.count in (1, 2)  # one worker or both, whichever was first to die again
    envs.close()
    assert all(map(gone, alive)) and not any(map(psutil.pid_exists, envs.workers.pids))


@pytest.mark.parametrize("allowed", [False, True])
def test_an_exception_is_the_users_to_mend_and_no_reason_to_restart(allowed):
    restarts = Restarts(allowed=allowed)
    envs = make(lambda: Faulty(index=2), restarts=restarts)
    alive = processes(envs)
    envs.reset(range(4))
    with pytest.raises(EnvError, match=r"ValueError from .*, environment 2, vector step 3"):
        for _ in range(3):
            envs.step(ZEROS)
    assert restarts.count == 0 and all(map(gone, alive))


# --------------------------------------------------------------------------------------------------
# What the user sees


@pytest.mark.parametrize("backend", ["sync", "process"])
@pytest.mark.parametrize("where", ["step", "reset", "constructor"])
def test_the_evidence_is_the_traceback_of_the_users_own_code(backend, where):
    def build():
        env = Faulty(index=2, where=where)
        if where == "constructor" and made:
            env.misbehave()
        made.append(env)
        return env

    made = []
    description = inspect_env(EnvSpec(id=register("Evidence", build)))
    if backend == "process":
        made.append(None)  # what is sent to the workers
    with pytest.raises(EnvError) as caught:
        envs = make_vector_env(description, num_envs=4, backend=backend, num_workers=2)
        envs.reset(range(4))
        for _ in range(3):
            envs.step(ZEROS)
    lines = caught.value.evidence.rstrip().splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: no wheels"
    assert any(line.endswith("in misbehave") for line in lines)
    assert "autoplace/envs" not in caught.value.evidence.replace("\\", "/").replace(
        "tests/envs", ""
    )
    assert "\n" not in str(caught.value)


def test_an_environment_that_does_not_exist_has_no_evidence():
    with pytest.raises(EnvError, match="there is no environment 'CartPool-v1'") as caught:
        inspect_env(EnvSpec(id="CartPool-v1"))
    assert caught.value.evidence == ""


def test_an_exception_arrives_within_seconds_however_long_the_deadline():
    class Raises(Counter):
        def step(self, action):
            raise ValueError(time.time())

    envs = make(Raises, deadline_s=3600.0)
    envs.reset(range(4))
    with pytest.raises(EnvError) as caught:
        envs.step(ZEROS)
    raised_s = float(str(caught.value).rpartition(" ")[2])
    assert time.time() - raised_s < 5.0  # what is promised


# --------------------------------------------------------------------------------------------------
# Memory


def watch(left, held):
    """A watch over processes 0, 1, ... that held 1 GiB each and hold ``held`` now."""
    found = MemoryWatch(
        range(len(held)), memory=lambda: (100 * GIB, left * GIB), resident=lambda pid: GIB
    )
    found._resident = lambda pid: held[pid] * GIB
    return found


@pytest.mark.parametrize(
    ("left", "held", "index"),
    [
        (50, [40, 1], None),  # much, but there is more
        (4, [6, 5], None),  # hardly any left, but not for their growth
        (4, [1, 7], 1),
        (4, [30, 7, 8], 0),
        (4, [], None),
    ],
)
def test_a_worker_leaks_when_memory_runs_out_and_it_took_it(left, held, index):
    found = watch(left, held).leaking()
    assert (None if found is None else found[0]) == index
    if index is not None:
        assert found[1] == (
            f"has grown from 1.00 GiB to {held[index]:.3g}"
            + (".00" if held[index] < 10 else ".0")
            + " GiB while 4.00 GiB of 100 GiB are left: "
            "look for what the environment keeps from step to step"
        )


def test_memory_that_may_be_used_is_known():
    whole, left = usable_memory()
    assert 0 < left < whole


@pytest.mark.parametrize("allowed", [False, True])
def test_a_worker_that_leaks_is_named_and_may_be_restarted(allowed):
    restarts = Restarts(allowed=allowed)
    envs = make(Faulty, restarts=restarts)
    alive = processes(envs)
    envs.reset(range(4))
    pids = envs.workers.pids
    envs._watch._memory = lambda: (100 * GIB, GIB)
    envs._watch._resident = lambda pid: 50 * GIB if pid == pids[1] else 0
    envs._look_s = 0.0  # it is time to look
    if not allowed:
        with pytest.raises(EnvError, match=r"worker 1 \(environments 2-3\) has grown from .* GiB"):
            envs.step(ZEROS)
        assert all(map(gone, alive))
        return
    step = envs.step(ZEROS)
    assert step.valid.tolist() == [True, True, False, False] and restarts.count == 1
    assert envs.step(ZEROS).valid is None
    envs.close()
