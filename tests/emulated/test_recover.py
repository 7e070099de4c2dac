"""A calibration gives back the machine it was made on, and plans that are truly best."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from autoplace.cost_model import fit_cost_model
from autoplace.measure import calibrate as calibration_module
from autoplace.measure.grid import calibration_tasks
from autoplace.measurement import Task
from tests.emulated.recover import (
    Pair,
    calibrate_machine,
    judge,
    recover,
    recovered_constants,
    recovered_crossovers,
)
from tests.emulated.spec import MachineSpec, load_spec

BASICS = ("matmul", "elementwise", "dispatch", "launch", "copy")
NOISE = {"lognormal_sigma": 0.05, "outlier_fraction": 0.02, "outlier_factor": 20.0}


@pytest.fixture
def basics_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the trainer's steps out, for tests of constants and crossovers alone."""

    def tasks(*args: object, **kwargs: object) -> list[Task]:
        return [t for t in calibration_tasks(*args, **kwargs) if t.op in BASICS]  # type: ignore[arg-type]

    monkeypatch.setattr(calibration_module, "calibration_tasks", tasks)


@pytest.mark.parametrize("name", ["laptop_weak_gpu", "slow_launch_driver"])
@pytest.mark.usefixtures("basics_only")
def test_without_noise_every_constant_and_crossover_is_given_back(name: str) -> None:
    spec = load_spec(name)
    calibration = calibrate_machine(spec)
    model = fit_cost_model(calibration)
    for pair in recovered_constants(spec, model):
        assert pair.error_fraction <= 0.02, pair
    for row in recovered_crossovers(spec, calibration, model):
        assert Pair(row["name"], row["known"], row["recovered"]).error_fraction <= 0.03, row


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.usefixtures("basics_only")
def test_noise_and_outliers_move_constants_by_less_than_5_and_crossovers_by_10_per_cent(
    seed: int,
) -> None:
    spec = load_spec("desktop_fast_gpu").with_noise(**NOISE, seed=seed)
    calibration = calibrate_machine(spec)
    model = fit_cost_model(calibration)
    for pair in recovered_constants(spec, model):
        assert pair.error_fraction <= 0.05, pair
    for row in recovered_crossovers(spec, calibration, model):
        if row["known"] is None:  # the two are alike at the smallest sizes and nowhere else
            assert row["recovered"] is None or row["recovered"] < 16, row
        else:
            assert Pair(row["name"], row["known"], row["recovered"]).error_fraction <= 0.10, row


@pytest.mark.parametrize(
    ("name", "workloads"),
    [
        ("desktop_fast_gpu", ("cartpole-like", "big net")),
        ("slow_launch_driver", None),
    ],
)
def test_the_chosen_scheme_is_truly_the_best_and_its_time_was_foreseen(
    name: str, workloads: tuple[str, ...] | None
) -> None:
    spec = load_spec(name)
    names = workloads or tuple(w.name for w in spec.workloads[:2])
    verdict = judge([recover(spec, names, quick=True)])
    assert verdict.cases == 2
    assert verdict.right == 2
    assert max(verdict.errors) <= 0.15
    assert verdict.median_error <= 0.06


def test_the_command_prints_what_users_of_the_format_expect(tmp_path: Path) -> None:
    spec = {
        "name": "tiny",
        "cpu": {"cores": 1},
        "workloads": [
            {"name": "only", "num_envs": 2, "rollout_steps": 16, "minibatch_rows": 16, "epochs": 1}
        ],
    }
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(spec))
    run = subprocess.run(
        [sys.executable, "-m", "tests.emulated.recover", str(file), "--json"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    found = json.loads(run.stdout)
    assert {row["name"] for row in found["constants"]} >= {"cpu.op_s", "cpu.flops_per_s"}
    assert all(set(row) == {"name", "known", "recovered"} for row in found["constants"])
    (workload,) = found["workloads"]
    assert (workload["name"], workload["chosen"]) == ("only", "cpu")
    (scheme,) = workload["schemes"]
    assert scheme["predicted_s"] == pytest.approx(scheme["true_s"], rel=0.15)


def coverage(spec: MachineSpec, repeats: int) -> tuple[float, float]:
    """Share of repeats whose stated 90 % intervals hold: of costs, and of crossovers.

    Costs are those of square products between the sizes that are timed.
    """
    from tests.emulated.recover import true_matmul_s

    held_costs, held_crossovers = [], []
    probe = [
        Task(op="matmul", device=device, shape=(n, n, n))
        for device in ("cpu", "emu:0")
        for n in (24, 48, 96, 180, 360, 720)
    ]
    for seed in range(repeats):
        noisy = spec.with_noise(**NOISE, seed=seed)
        calibration = calibrate_machine(noisy)
        model = fit_cost_model(calibration)
        costs = model.predict(probe)
        held_costs += [costs[t].low_s <= true_matmul_s(spec, t) <= costs[t].high_s for t in probe]
        for row in recovered_crossovers(spec, calibration, model):
            if row["known"] and row["recovered"]:
                low, high = row["low"] or 0.0, row["high"] or np.inf
                held_crossovers.append(low <= row["known"] <= high)
    return float(np.mean(held_costs)), float(np.mean(held_crossovers))


def one_core_and_a_gpu() -> MachineSpec:
    spec = load_spec("desktop_fast_gpu")
    return dataclasses.replace(spec, cpu=dataclasses.replace(spec.cpu, cores=1))


@pytest.mark.usefixtures("basics_only")
def test_stated_intervals_hold_about_as_often_as_they_say() -> None:
    costs, _ = coverage(one_core_and_a_gpu(), repeats=3)
    assert 0.75 <= costs <= 1.0


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.usefixtures("basics_only")
def test_stated_90_per_cent_intervals_cover_the_truth_in_85_to_95_per_cent() -> None:
    costs, crossovers = coverage(one_core_and_a_gpu(), repeats=400)
    print(f"covered: costs {costs:.3f}, crossovers {crossovers:.3f}")
    assert 0.85 <= costs <= 0.95
    assert 0.85 <= crossovers <= 0.95
