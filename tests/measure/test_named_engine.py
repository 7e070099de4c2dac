"""Steps by an engine that takes long to make ready."""

import time

import pytest

from autoplace import device as devices
from autoplace.engines import COMPILE
from autoplace.errors import EngineError
from autoplace.measure import named_engine
from autoplace.measure.named_engine import engine_tasks, measure_engine
from autoplace.ppo import steps
from autoplace.workload import NetworkSpec
from tests.measure.test_own_network import workload
from tests.ppo.test_engines import Broken, Odd
from tests.synthetic import GPU

PLAIN = NetworkSpec(observation_size=4, hidden_sizes=(8,), action_size=2)


def tasks_of(devices=("cpu",), cpus=1, **options):
    return engine_tasks(COMPILE, workload(PLAIN), devices, cpus, **options)


def test_the_ends_of_what_the_planner_may_choose_are_timed_with_one_and_with_all_threads():
    tasks = tasks_of(("cpu", GPU), 8, minibatch_rows=(64, 128, 32))
    assert all((t.network, t.engine) == (PLAIN, COMPILE) for t in tasks)
    sizes = (("policy_step", 2), ("update", 32), ("update", 128))
    assert [(t.device, t.threads, t.op, t.rows) for t in tasks] == [
        (on, threads, *size) for on, threads in (("cpu", 1), ("cpu", 8), (GPU, 1)) for size in sizes
    ]


class SlowOnce(Odd):
    """Takes 0.1 s to be ready, and is eager then."""

    def after(self):
        if not getattr(self, "is_ready", False):
            time.sleep(0.1)
            self.is_ready = True


def test_what_is_paid_once_is_told_from_what_each_step_takes(monkeypatch):
    monkeypatch.setattr(named_engine, "_TIME_LIMIT_S", 0.02)
    monkeypatch.setitem(steps._UPDATERS, COMPILE, SlowOnce)
    monkeypatch.setitem(steps._POLICY_STEPS, COMPILE, steps.PolicyStep)
    found = {m.task.op: m for m in measure_engine(tasks_of(minibatch_rows=(16,)))}
    assert set(found) == {"policy_step", "update", "engine_setup"}
    assert found["engine_setup"].median_s > 0.05 > found["update"].median_s


def test_an_engine_that_does_not_work_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(steps._UPDATERS, COMPILE, Broken)
    monkeypatch.setitem(steps._POLICY_STEPS, COMPILE, steps.PolicyStep)
    with pytest.raises(EngineError) as found:
        measure_engine(tasks_of(minibatch_rows=(16,)))
    assert str(found.value) == (
        "engine compile does not work on cpu (RuntimeError: no compiler was found)"
    )


def test_a_virtual_clock_times_no_such_engine(monkeypatch):
    monkeypatch.setattr(devices, "spawns_processes", lambda: False)
    with pytest.raises(EngineError, match="cannot be timed by a virtual clock"):
        measure_engine(tasks_of())
