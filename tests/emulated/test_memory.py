"""What a plan says of device memory, against what the trainer allocates there."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from autoplace.cost_model import CostModel, fit_cost_model
from autoplace.errors import RunError, UsageError
from autoplace.measurement import Calibration
from autoplace.planner.memory import Limits, estimate_bytes
from autoplace.planner.plan import Plan
from autoplace.planner.search import make_plan
from autoplace.train import train
from autoplace.units import format_bytes
from autoplace.workload import EnvSpec, Workload
from tests.emulated.machine import EmulatedMachine
from tests.emulated.recover import calibrate_machine, workload_of
from tests.emulated.runtime import runtime
from tests.emulated.spec import AcceleratorSpec, CpuSpec, MachineSpec, WorkloadSpec
from tests.synthetic import env_measurements

DEVICE = "emu:0"
SCHEMES = ("hybrid", "gpu", "double-buffer", "async")
PLENTY = 2**40


def sizes(
    obs: int, hidden: tuple[int, ...], envs: int, steps: int, rows: int, continuous: bool
) -> WorkloadSpec:
    return WorkloadSpec(
        name=f"{obs} {hidden} {envs} x {steps} {rows}",
        obs_dim=obs,
        num_actions=4,
        continuous=continuous,
        hidden_sizes=hidden,
        num_envs=envs,
        rollout_steps=steps,
        minibatch_rows=rows,
        epochs=1,
        env_step_s=1e-4,
    )


# What each of them is bound by: activations of the whole rollout, the rollout itself, weights, and
# activations of a minibatch.
BOUND_BY = (
    sizes(16, (64, 64), 8, 128, 64, True),
    sizes(512, (64, 64), 8, 64, 64, False),
    sizes(16, (512, 512), 8, 16, 64, False),
    sizes(8, (64, 64, 64), 8, 64, 512, True),
)


def spec(memory_bytes: float = 8e9) -> MachineSpec:
    card = AcceleratorSpec(memory_bytes=memory_bytes)
    return MachineSpec(cpu=CpuSpec(cores=4), accelerators=(card,))


@functools.lru_cache(maxsize=4)
def calibrated(env: EnvSpec) -> tuple[Calibration, CostModel]:
    """The machine, whose memory matters to no cost."""
    calibration = machine_only().with_measurements(env_measurements(env, 1e-4))
    return calibration, fit_cost_model(calibration)


@functools.lru_cache(maxsize=1)
def machine_only() -> Calibration:
    return calibrate_machine(spec(), quick=True)


def planned(workload: Workload, scheme: str, limit: int | None = None) -> Plan:
    calibration, model = calibrated(workload.env)
    return make_plan(
        calibration,
        workload,
        scheme=scheme,
        placement={"device": DEVICE, "engine": "eager"},
        limits=None if limit is None else Limits(host_bytes=PLENTY, device_bytes=limit),
        model=model,
    )


def peak_bytes(plan: Plan, memory_bytes: float = 8e9) -> int:
    """The most that the trainer held on the device in its first iterations.

    Raises:
        RunError: it did not fit.
    """
    rows = plan.workload.hyperparameters.rollout_rows
    with EmulatedMachine(spec(memory_bytes), dry=True):
        memory = runtime().memories[0]
        train(plan, total_steps=3 * rows)
        return memory.peak_bytes


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("sizes", BOUND_BY, ids=lambda sizes: sizes.name)
def test_device_memory_is_estimated_within_a_tenth(sizes: WorkloadSpec, scheme: str) -> None:
    plan = planned(workload_of(sizes), scheme)
    estimate = estimate_bytes(plan.workload, plan.placement)[DEVICE]
    assert estimate == pytest.approx(peak_bytes(plan), rel=0.1)


def random_sizes(rng: np.random.Generator) -> WorkloadSpec:
    def about(low: float, high: float) -> int:
        return int(2 ** rng.uniform(low, high))

    envs, steps = 2 ** int(rng.integers(0, 4)), about(3, 6)
    return sizes(
        obs=about(1, 10),
        hidden=(about(3, 9),) * int(rng.integers(1, 4)),
        envs=envs,
        steps=steps,
        rows=max(2, min(envs * steps, about(3, 9))),
        continuous=bool(rng.integers(2)),
    )


@pytest.mark.parametrize(
    "tries", [6, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_no_plan_runs_out_of_device_memory(tries: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    runs = refused = 0
    while runs < tries:
        workload = workload_of(random_sizes(rng))
        scheme = SCHEMES[int(rng.integers(len(SCHEMES)))]
        try:
            free = planned(workload, scheme)
        except UsageError:  # one environment cannot be shared out
            continue
        limit = int(peak_of(free) * 2 ** rng.uniform(-1, 1.5))
        try:
            plan = planned(workload, scheme, limit)
        except UsageError as refusal:
            assert "no placement fits" in str(refusal)
            refused += 1
            continue
        peak_bytes(plan, limit)  # raises where it does not fit
        assert "ran out of memory" not in caplog.text  # nor was a minibatch cut into more parts
        runs += 1
    print(f"{runs} runs, {refused} refused")
    assert refused > 0


def peak_of(plan: Plan) -> int:
    return estimate_bytes(plan.workload, plan.placement)[DEVICE]


def test_a_plan_that_knows_no_limit_does_run_out(caplog: pytest.LogCaptureFixture) -> None:
    # Symptom: the whole rollout on the card, and the traceback of an allocator.
    plan = planned(workload_of(BOUND_BY[0]), "hybrid")
    with pytest.raises(RunError, match=r"memory ran out \(emu:0 .*fewer --rollout-steps") as caught:
        peak_bytes(plan, peak_of(plan) / 2)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert "\n" not in str(caught.value)
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(f"this run needs about {format_bytes(peak_of(plan))} on emu:0")
    assert f"of which {format_bytes(peak_of(plan) // 2)} are free" in message
