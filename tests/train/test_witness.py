"""What is seen of a machine beside a run."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest

from autoplace.measurement import Calibration, Measurement, Task
from autoplace.train import witness
from autoplace.train.witness import SystemWitness, choose_sentinels, retime
from tests.synthetic import make_machine
from tests.train.plans import make_plan


class Times(NamedTuple):
    user: float
    system: float
    idle: float
    iowait: float = 0.0
    guest: float = 0.0


class Process:
    """A process that has worked so long, with one child."""

    worked_s = 0.0
    child_s = 0.0

    def children(self, recursive):
        return [SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=self.child_s, system=0.0))]

    def cpu_times(self):
        return SimpleNamespace(user=self.worked_s, system=0.0)


def test_others_are_what_the_cpus_did_less_this_program_and_its_children(monkeypatch):
    state = {"now": 100.0, "busy": [50.0, 20.0, 900.0], "throttled": 0.0}
    monkeypatch.setattr(witness, "_usable_cpus", lambda: [0, 1])
    monkeypatch.setattr(witness.time, "monotonic", lambda: state["now"])
    monkeypatch.setattr(witness.psutil, "Process", Process)
    monkeypatch.setattr(
        witness.psutil,
        "cpu_times",
        lambda percpu: [Times(busy / 2, busy / 2, 1e6, guest=3.0) for busy in state["busy"]],
    )
    monkeypatch.setattr(witness.cgroups, "throttled_s", lambda: state["throttled"])
    seen = SystemWitness()
    # In 10 s the two CPUs work for 8 + 9 s: 6 s for this process, 5 s for its child.
    state.update(now=110.0, busy=[58.0, 29.0, 1000.0], throttled=0.5)
    monkeypatch.setattr(Process, "worked_s", 6.0)
    monkeypatch.setattr(Process, "child_s", 5.0)
    evidence = seen.read()
    assert evidence.other_cpus == pytest.approx(0.6)
    assert evidence.usable_cpus == 2
    assert evidence.throttled_fraction == pytest.approx(0.05)
    assert evidence.slowdown == {}


def test_the_real_counters_can_be_read():
    seen = SystemWitness()
    sum(range(100_000))
    evidence = seen.read()
    assert evidence.other_cpus >= 0 and 0 <= evidence.throttled_fraction < 100
    assert evidence.usable_cpus >= 1


def product(size, seconds, **options):
    task = Task(op="matmul", shape=(size, size, size), **options)
    return Measurement(task=task, times_s=(seconds,) * 5)


def test_sentinels_are_products_of_a_handy_time_on_each_device_in_use():
    calibration = Calibration(
        machine=make_machine(),
        measurements=(
            product(32, 1e-5),
            product(256, 3e-4),
            product(1024, 2e-2),
            product(256, 2e-4, threads=2),
            product(512, 1e-4, device="cuda:0"),
            product(2048, 1e-2, device="cuda:0"),
            product(512, 1e-4, device="cuda:1"),
        ),
    )
    plan = make_plan(scheme="hybrid", device="cuda:0")
    assert [(m.task.device, m.task.shape[0]) for m in choose_sentinels(calibration, plan)] == [
        ("cpu", 256),
        ("cuda:0", 512),
    ]
    assert choose_sentinels(None, plan) == ()
    # There, a learner in a process of its own has the only context on the device.
    apart = make_plan(scheme="double-buffer", device="cuda:0")
    assert [m.task.device for m in choose_sentinels(calibration, apart)] == ["cpu"]


def test_a_sentinel_is_timed_as_it_was_calibrated():
    (honest,) = retime([product(128, 1.0)]).values()
    (ten_times_faster,) = retime([product(128, 0.1)]).values()
    assert 0 < honest < 1
    assert ten_times_faster / honest == pytest.approx(10, rel=0.9)
