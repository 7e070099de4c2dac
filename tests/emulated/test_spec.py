"""Machine specs: defaults, errors, and those that come with the tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.emulated import EmulatedMachine, MachineSpec, load_spec, spec_names
from tests.emulated.spec import AcceleratorSpec, CpuSpec, Efficiency, SpecError, WorkloadSpec


def test_every_key_has_a_default() -> None:
    spec = MachineSpec.from_json({})
    assert spec.cpu == CpuSpec()
    assert spec.accelerators == ()
    assert MachineSpec.from_json({"accelerators": [{}]}).accelerators == (AcceleratorSpec(),)


def test_the_format_of_the_issue_is_read() -> None:
    spec = MachineSpec.from_json(
        json.loads("""{"name": "x",
        "cpu": {"cores": 12, "op_s": 3e-6, "flops_per_s": 6e10, "mem_bytes_per_s": 1.5e10,
                "thread_efficiency": 0.85, "handoff_s": 2e-5, "worker_start_s": 0.5},
        "accelerators": [{"host_dispatch_s": 6e-6, "launch_s": 4e-6, "flops_per_s": 8e12,
                "mem_bytes_per_s": 6e11, "memory_bytes": 8e9, "unified_memory": false,
                "copy_latency_s": 1e-5, "pinned_bytes_per_s": 2e10, "pageable_bytes_per_s": 6e9,
                "d2h_pinned_bytes_per_s": 2e10, "d2h_pageable_bytes_per_s": 6e9,
                "efficiency": {"half_rate_rows": 64}}],
        "noise": {"lognormal_sigma": 0, "outlier_fraction": 0, "outlier_factor": 1,
                "drift_per_s": 0, "competing_load": 0, "seed": 0},
        "workloads": [{"name": "w", "obs_dim": 4, "num_actions": 2, "continuous": false,
                "hidden_sizes": [64, 64], "num_envs": 8, "rollout_steps": 128,
                "minibatch_rows": 256, "epochs": 4, "env_step_s": 2e-5,
                "env_step_spread_s": 5e-6}]}""")
    )
    assert spec.cpu.cores == 12
    assert spec.accelerators[0].efficiency == Efficiency(half_rate_rows=64)
    assert spec.workloads[0].hidden_sizes == (64, 64)
    assert spec.workloads[0].env_kwargs["env_step_spread_s"] == 5e-6


def test_a_spec_survives_json() -> None:
    spec = load_spec(spec_names()[0])
    assert MachineSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_copy_bandwidths_that_are_left_out_follow_from_the_others() -> None:
    given = AcceleratorSpec(pinned_bytes_per_s=9e9)
    assert given.pageable_bytes_per_s == 3e9
    assert given.d2h_pinned_bytes_per_s == 9e9
    assert given.d2h_pageable_bytes_per_s == 3e9
    unified = AcceleratorSpec(unified_memory=True, mem_bytes_per_s=1e11)
    assert unified.pinned_bytes_per_s == unified.pageable_bytes_per_s == 5e10


def test_threads_and_rows_scale_rates_as_declared() -> None:
    assert CpuSpec(thread_efficiency=0.5).speedup(4) == 2.5
    assert Efficiency(half_rate_rows=64).factor(64) == 0.5
    assert Efficiency().factor(1) == 1.0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"cpus": {}}, "machine has no key cpus: it has name, cpu"),
        ({"cpu": {"flops": 1}}, r"machine.cpu has no key flops"),
        ({"accelerators": [{}, {"x": 1}]}, r"machine.accelerators\[1\] has no key x"),
        ({"accelerators": {}}, "machine.accelerators is a list"),
        ({"cpu": 3}, "machine.cpu is a JSON object"),
        ({"cpu": {"cores": 0}}, "machine.cpu: cores is above 0, got 0"),
        ({"cpu": {"op_s": -1}}, "op_s is 0 or more"),
        ({"cpu": {"op_s": "3e-6"}}, "op_s is a number"),
        ({"noise": {"outlier_fraction": 2}}, "outlier_fraction is at most 1"),
        ({"accelerators": [{"efficiency": {"rows": 1}}]}, r"efficiency has no key rows"),
        ({"workloads": [{"minibatch_rows": 1}]}, "minibatch_rows is between 2"),
        ([], "machine is a JSON object"),
    ],
)
def test_a_wrong_spec_is_refused(data: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        MachineSpec.from_json(data)


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text("{")
    with pytest.raises(SpecError, match="not JSON"):
        load_spec(file)


def test_there_are_seven_machines_of_eight_varied_workloads() -> None:
    assert len(spec_names()) == 7
    for name in spec_names():
        spec = load_spec(name)
        assert len(spec.workloads) >= 8
        assert len({w.name for w in spec.workloads}) == len(spec.workloads)
        assert {w.continuous for w in spec.workloads} == {False, True}
        assert max(w.env_step_s for w in spec.workloads) > 10 * min(
            w.env_step_s for w in spec.workloads
        )


@pytest.mark.parametrize("name", spec_names())
def test_each_machine_can_be_switched_on_and_describes_itself(name: str) -> None:
    spec = load_spec(name)
    with EmulatedMachine(spec) as running:
        machine = running.machine()
    assert machine.usable_cpus == spec.cpu.cores
    assert tuple(a.device for a in machine.accelerators) == running.devices
    assert len({a.uuid for a in machine.accelerators}) == len(spec.accelerators)


def test_a_workload_needs_a_minibatch_that_fits() -> None:
    with pytest.raises(SpecError, match="32 rows, got 64"):
        WorkloadSpec(num_envs=4, rollout_steps=8, minibatch_rows=64)
