"""Other processes that are kept busy while something is timed."""

from __future__ import annotations

import multiprocessing

import psutil
import pytest

from autoplace import device
from autoplace.measure import load as load_module
from autoplace.measure.load import Load, LoadError
from autoplace.measurement import Task
from autoplace.workload import NetworkSpec

NETWORK = NetworkSpec(observation_size=4, hidden_sizes=(8,), action_size=2)
UPDATE = Task(op="update", network=NETWORK, rows=8)


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in processes)


def wait_s(seconds: float) -> None:
    end_s = device.now() + seconds
    while device.now() < end_s:
        pass


@pytest.mark.parametrize("learner", [None, UPDATE], ids=["python", "learner"])
def test_it_works_when_told_to_and_rests_otherwise(learner: Task | None) -> None:
    load = Load(learner)
    try:
        with load.on(1):
            (process,) = children()
            before_s = cpu_s([process])
            wait_s(0.5)
            busy_s = cpu_s([process]) - before_s
        before_s = cpu_s([process])
        wait_s(0.5)
        assert busy_s > 0.05  # on a machine that others use too
        assert cpu_s([process]) - before_s < 0.5 * busy_s
        with load.on(1):  # the same one again
            assert [p.pid for p in children()] == [process.pid]
        with load.on(0):
            pass
    finally:
        load.close()
    assert not process.is_running()


def test_a_process_that_is_gone_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "_ANSWER_TIMEOUT_S", 5.0)
    load = Load(None)
    try:
        with load.on(1):
            (process,) = children()
        # Its own handle waits for it: whoever else did would leave that one without an end.
        (own,) = (c for c in multiprocessing.active_children() if c.pid == process.pid)
        own.kill()
        own.join()
        with pytest.raises(LoadError, match="no other process could be kept busy"), load.on(1):
            pass
    finally:
        load.close()
