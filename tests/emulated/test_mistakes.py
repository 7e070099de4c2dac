"""The well-known mistakes, each made on purpose: what catches it, and that the real code does not
make it.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autoplace import device
from autoplace.measure.probes import build_probe
from autoplace.measure.timing import Probe, Series, run_probe
from autoplace.measurement import Task
from autoplace.planner.plan import Plan
from autoplace.ppo.policy_step import PolicyStep
from autoplace.ppo.rollout import Rollout
from autoplace.train import train
from autoplace.workload import NetworkSpec
from tests.emulated import EmulatedMachine
from tests.emulated.recover import true_matmul_s
from tests.emulated.spec import MachineSpec, load_spec
from tests.train.plans import Listener, make_plan

D = "emu:0"


@pytest.fixture
def desktop() -> MachineSpec:
    return load_spec("desktop_fast_gpu")


def median_s(probe: Probe) -> float:
    series = Series(tasks=probe.tasks)
    run_probe(probe, series, time_limit_s=1.0)
    return series.measurements()[0].median_s


# -------------------------------------------------------------------------------- no synchronise


def test_timing_without_a_synchronise_gives_the_time_to_ask_not_to_do(desktop: MachineSpec) -> None:
    task = Task(op="matmul", device=D, shape=(1024, 1024, 1024))
    truth_s = true_matmul_s(desktop, task)
    with EmulatedMachine(desktop, dry=True):
        a = torch.zeros(1024, 1024, device=D)

        def careless(calls: int) -> tuple[float]:
            start_s = device.now()
            for _ in range(calls):
                torch.mm(a, a)
            return ((device.now() - start_s) / calls,)

        wrong_s = median_s(Probe(tasks=(task,), sample=careless))
        right_s = median_s(build_probe(task))
    assert wrong_s < 0.1 * truth_s
    assert right_s == pytest.approx(truth_s, rel=0.01)


@pytest.mark.parametrize("op", ["update", "gae"])
def test_the_trainers_own_steps_are_waited_for_when_they_are_timed(
    op: str, desktop: MachineSpec
) -> None:
    network = NetworkSpec(observation_size=64, hidden_sizes=(1024, 1024), action_size=8)
    shape = (64, 64) if op == "gae" else ()
    with EmulatedMachine(desktop, dry=True) as machine:
        probe = build_probe(
            Task(op=op, device=D, network=network, rows=4096 * (op == "update"), shape=shape)
        )
        probe.sample(8)
        busy_until_s = machine.clock.devices[0].free_s(0)
        assert device.now() >= busy_until_s


# -------------------------------------------------------------------------------- read too early


def test_reading_a_non_blocking_copy_too_early_reads_nothing_useful(desktop: MachineSpec) -> None:
    with EmulatedMachine(desktop):
        there = torch.ones(1000, device=D)
        here = device.host_empty((1000,), pinned_for=D)
        here.copy_(there, non_blocking=True)
        assert torch.isnan(here).all()
        device.synchronize(D)
        assert (here == 1).all()


def test_the_channel_gives_back_what_was_computed(desktop: MachineSpec) -> None:
    with EmulatedMachine(desktop):
        outbound = device.Channel((4,), torch.float32, D)
        for value in (1.0, 2.0):
            received = outbound.receive(torch.full((4,), value, device=D))
            assert (received == value).all()


def test_a_channel_that_does_not_wait_is_caught(
    desktop: MachineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive(self: device.Channel, tensor: torch.Tensor) -> object:
        self._host.copy_(tensor, non_blocking=True)
        return self._array

    monkeypatch.setattr(device.Channel, "receive", receive)
    with EmulatedMachine(desktop), pytest.raises(Exception, match=r"."):
        train(make_plan("Pendulum-v1", scheme="gpu", device=D), total_steps=160)


def test_a_chunk_that_is_learned_from_before_it_has_arrived_is_caught(desktop: MachineSpec) -> None:
    network = NetworkSpec(observation_size=256, hidden_sizes=(8,), action_size=2)
    sizes = {"rollout_steps": 64, "num_envs": 8}
    with EmulatedMachine(desktop):
        host = Rollout(network, **sizes, pinned_for=D)
        there = Rollout(network, **sizes, device=D)
        host.observations.fill_(1.0)
        copies = device.CopyStream(D)
        with copies.after_current():
            there.copy_steps_from(host, 0, 64)
        with pytest.raises(RuntimeError, match="still copying"):
            there.observations.sum()
        copies.join()
        assert float(there.observations[:64].sum()) == 64 * 8 * 256


# -------------------------------------------------------------------------------- wrong device


def test_a_fresh_tensor_on_the_wrong_device_is_caught(
    desktop: MachineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PolicyStep.__call__

    def with_host_noise(self, observations, noise, rollout, t):  # type: ignore[no-untyped-def]
        return original(self, observations, torch.zeros(noise.shape), rollout, t)

    monkeypatch.setattr(PolicyStep, "__call__", with_host_noise)
    with EmulatedMachine(desktop), pytest.raises(RuntimeError, match="same device"):
        train(make_plan(scheme="gpu", device=D), total_steps=160)


# -------------------------------------------------------------------------------- read back


def waits_per_vector_step(plan: Plan, spec: MachineSpec) -> float:
    """Waits of the host for the device in one iteration, over its vector steps."""
    counts: list[int] = []

    class CountWaits(Listener):
        def on_iteration(self, report) -> None:  # type: ignore[no-untyped-def]
            counts.append(machine.clock.counts["wait"])

    with EmulatedMachine(spec) as machine:
        rows = plan.workload.hyperparameters.rollout_rows
        train(plan, total_steps=3 * rows, callbacks=[CountWaits()])
    return (counts[-1] - counts[-2]) / plan.workload.hyperparameters.rollout_steps


def long_plan(**where: object) -> Plan:
    return make_plan(rollout_steps=128, epochs=1, rows=64, **where)


def test_the_gpu_scheme_waits_once_per_vector_step_and_the_others_not_at_all(
    desktop: MachineSpec,
) -> None:
    assert waits_per_vector_step(long_plan(scheme="gpu", device=D), desktop) == pytest.approx(
        1.0, abs=0.2
    )
    assert waits_per_vector_step(long_plan(scheme="hybrid", device=D), desktop) < 0.2


def test_a_value_read_back_inside_the_sampling_loop_is_caught(
    desktop: MachineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Callable[..., torch.Tensor] = PolicyStep.__call__

    def with_a_look(self, observations, noise, rollout, t):  # type: ignore[no-untyped-def]
        actions = original(self, observations, noise, rollout, t)
        float(actions.sum())
        return actions

    monkeypatch.setattr(PolicyStep, "__call__", with_a_look)
    assert waits_per_vector_step(long_plan(scheme="gpu", device=D), desktop) > 1.8


# -------------------------------------------------------------------------------- touching it


SAMPLER = """
import sys, torch
from tests.emulated import EmulatedMachine, load_spec
from tests.emulated import runtime
from tests.train.plans import make_plan
from autoplace.train import train
from autoplace.ppo.policy_step import PolicyStep

touch = sys.argv[1] == "touch"
original = PolicyStep.__call__
def step(self, observations, noise, rollout, t):
    if touch:
        torch.zeros(1, device="emu:0")
    return original(self, observations, noise, rollout, t)
PolicyStep.__call__ = step
with EmulatedMachine(load_spec("desktop_fast_gpu")) as machine:
    train(make_plan(scheme="cpu"), total_steps=160)
    used = machine.clock.counts["launch"] + machine.clock.counts["copy"]
sys.exit(3 if used else 0)
"""


@pytest.mark.parametrize(("how", "code"), [("leave", 0), ("touch", 3)])
def test_a_sampler_on_the_cpu_never_touches_an_accelerator(how: str, code: int) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SAMPLER, how],
        check=False,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == code, run.stderr


# -------------------------------------------------------------------------------- learning


def test_an_emulated_run_learns_cartpole(desktop: MachineSpec) -> None:
    plan = make_plan(
        scheme="gpu", device=D, num_envs=8, rollout_steps=64, epochs=6, rows=128,
        learning_rate=1e-3, anneal_learning_rate=False,
    )  # fmt: skip
    with EmulatedMachine(desktop):
        result = train(plan, total_steps=25 * 512)
    assert result.mean_return is not None and result.mean_return > 70


def test_rollouts_on_the_device_count_against_its_memory(desktop: MachineSpec) -> None:
    small = dataclasses.replace(desktop.accelerators[0], memory_bytes=1e6)
    spec = dataclasses.replace(desktop, accelerators=(small,))
    network = NetworkSpec(observation_size=1000, hidden_sizes=(8,), action_size=2)
    with EmulatedMachine(spec), pytest.raises(torch.OutOfMemoryError):
        Rollout(network, rollout_steps=128, num_envs=8, device=D)
