"""What the probes run."""

from __future__ import annotations

import dataclasses
import math
import queue

import pytest

from autoplace import device
from autoplace.interpreter import interpret_when_told
from autoplace.measure import probes
from autoplace.measure.probes import build_probe
from autoplace.measurement import Task
from autoplace.physics import Matmul, Primitives, physics
from autoplace.workload import NetworkSpec
from tests.emulated.machine import EmulatedMachine
from tests.emulated.spec import AcceleratorSpec, CpuSpec, MachineSpec

NETWORK = NetworkSpec(observation_size=4, hidden_sizes=(16,), action_size=2)
GAE = Task(op="gae", network=NETWORK, shape=(8, 2))


@pytest.fixture
def emulated():
    with EmulatedMachine(MachineSpec(cpu=CpuSpec(cores=2, handoff_s=3e-5))) as machine:
        yield machine


@pytest.mark.parametrize("task", [GAE, Task(op="hand_over")], ids=lambda task: task.op)
def test_what_runs_once_per_iteration_is_timed_after_other_work(emulated, task):
    probe = build_probe(task)
    start_s = device.now()
    (seconds,) = probe.sample(3)
    # The work in between is no part of the time.
    assert device.now() - start_s == pytest.approx(3 * (probes._APART_S + seconds), rel=1e-3)
    assert probe.max_calls == 1
    probe.close()


def test_a_hand_over_is_a_message_there_and_back(emulated):
    probe = build_probe(Task(op="hand_over"))
    (seconds,) = probe.sample(1)
    probe.close()
    assert seconds == pytest.approx(2 * 3e-5, rel=0.01)


def test_a_crowd_is_timed_until_its_last_process_is_through(emulated):
    probe = build_probe(Task(op="crowd", shape=(1 << 11,), workers=3))
    two, three = probe.sample(1)[-2:]
    probe.close()
    # The emulated machine shares its cores out evenly.
    assert two == pytest.approx((1 << 11) * probes._STRETCH_S, rel=0.02)
    assert three == pytest.approx(1.5 * two, rel=0.02)


def test_processes_of_a_crowd_do_as_much_as_they_are_told():
    orders, answers, done = queue.SimpleQueue(), queue.SimpleQueue(), []
    for order in (3, 5, None):
        orders.put(order)
    interpret_when_told(orders, answers, done.append)
    assert done == [3, 5]
    assert [answers.get(), answers.get()] == [3, 5] and answers.empty()


def test_a_crowd_of_real_processes_is_through_when_the_last_one_is():
    probe = build_probe(Task(op="crowd", shape=(256,), workers=2))
    alone_s, together_s = probe.sample(1)  # the other process has yet to start
    probe.close()
    assert together_s > alone_s
    assert [task.workers for task in probe.tasks] == [1, 2]


def test_a_rollout_that_is_made_ready_has_its_observations_in_the_statistics(monkeypatch):
    counts = []
    build = probes.timed_network

    def watched(*arguments, **options):
        network = build(*arguments, **options)
        update = network.update_statistics
        monkeypatch.setattr(
            network, "update_statistics", lambda rows: (counts.append(len(rows)), update(rows))
        )
        return network

    monkeypatch.setattr(probes, "timed_network", watched)
    build_probe(dataclasses.replace(GAE, engine="numpy")).sample(2)
    assert counts == [16, 16]


ON = "emu:0"


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("on", ["cpu", ON])
def test_a_first_step_is_timed_with_all_that_is_done_once_per_update(on, depth):
    network = dataclasses.replace(NETWORK, hidden_sizes=(16,) * depth)
    step = Task(op="update", device=on, network=network, rows=8)
    first = dataclasses.replace(step, op="first_update")
    card = AcceleratorSpec(host_dispatch_s=1e-5, launch_s=0.0)
    cpu = CpuSpec(cores=2, op_s=1e-5)
    primitives = Primitives(
        devices=("cpu", ON),
        dispatch_s={"cpu": 1.0, ON: 1.0},
        matmul={(name, 1): Matmul(0.0, math.inf, math.inf, 0.0, 0.0) for name in ("cpu", ON)},
    )
    with EmulatedMachine(MachineSpec(cpu=cpu, accelerators=(card,)), dry=True):
        (one_s,), (whole_s,) = (build_probe(task).sample(3) for task in (step, first))
    counted = [physics(primitives, task).host_s[0] for task in (step, first)]
    assert (whole_s - one_s) / 1e-5 == pytest.approx(counted[1] - counted[0], rel=0.1)


@pytest.mark.parametrize("steps", [16, 256])
def test_what_is_not_scaled_is_left_out_of_a_probe_and_of_its_physics(steps):
    """On a device where issuing operations takes longer than running them."""
    policy = Task(op="policy_step", device=ON, network=NETWORK, rows=4)
    gae = dataclasses.replace(policy, op="gae", rows=0, shape=(steps, 4))
    card = AcceleratorSpec(host_dispatch_s=1e-5, launch_s=0.0)
    primitives = Primitives(
        devices=("cpu", ON),
        dispatch_s={"cpu": 0.0, ON: 1.0},
        matmul={(name, 1): Matmul(0.0, 1.0, 1.0, 0.0, 0.0) for name in ("cpu", ON)},
    )

    def saved(task, part, **flags):
        """(operations that the probe does less, operations that physics counts less)"""
        other = dataclasses.replace(task, **flags)
        timed = [build_probe(each).sample(3)[part] / 1e-5 for each in (task, other)]
        counted = [physics(primitives, each).host_s[0] for each in (task, other)]
        return timed[0] - timed[1], counted[0] - counted[1]

    with EmulatedMachine(MachineSpec(cpu=CpuSpec(cores=2), accelerators=(card,)), dry=True):
        assert saved(policy, 1, standardized=False) == (pytest.approx(3), 3)
        for flags in ({"standardized": False}, {"scaled_rewards": False}):
            timed, counted = saved(gae, 0, **flags)
            assert counted == pytest.approx(timed, rel=0.1)
