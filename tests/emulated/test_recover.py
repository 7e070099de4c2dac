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
    BUDGET_S,
    Pair,
    calibrate_machine,
    judge,
    recover,
    recovered_constants,
    recovered_crossovers,
    true_matmul_s,
)
from tests.emulated.replay import BASICS, Replay
from tests.emulated.spec import NoiseSpec, load_spec

NOISE = {"lognormal_sigma": 0.05, "outlier_fraction": 0.02, "outlier_factor": 20.0}


@pytest.fixture
def basics_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the trainer's steps out, for tests of constants and crossovers alone."""

    def tasks(*args: object, **kwargs: object) -> list[Task]:
        return [t for t in calibration_tasks(*args, **kwargs) if t.op in BASICS]  # type: ignore[arg-type]

    monkeypatch.setattr(calibration_module, "calibration_tasks", tasks)
    monkeypatch.setattr(calibration_module, "candidate_tasks", lambda *_, **__: [])


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


@pytest.mark.usefixtures("basics_only")
def test_noise_and_outliers_move_constants_by_less_than_5_and_crossovers_by_10_per_cent() -> None:
    spec = load_spec("desktop_fast_gpu").with_noise(**NOISE, seed=0)
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


@dataclasses.dataclass
class Coverage:
    """What many noisy calibrations of one machine claimed, held against the truth."""

    costs: list[bool] = dataclasses.field(default_factory=list)
    crossovers: list[bool] = dataclasses.field(default_factory=list)
    constant_errors: list[float] = dataclasses.field(default_factory=list)
    crossover_errors: list[float] = dataclasses.field(default_factory=list)


def coverage(name: str, repeats: int) -> Coverage:
    """Calibrate a machine with one core and one accelerator under noise, again and again.

    Costs are those of square products between the sizes that are timed.
    """
    spec = load_spec(name)
    spec = dataclasses.replace(spec, cpu=dataclasses.replace(spec.cpu, cores=1))
    devices = ("cpu", "emu:0")
    tasks = [task for task in calibration_tasks(devices, 1) if task.op in BASICS]
    asked = [
        Task(op="matmul", device=device, shape=(n, n, n), residency=residency)
        for device, residency in (("cpu", "resident"), ("emu:0", "resident"), ("emu:0", "copied"))
        for n in (24, 48, 96, 180, 360, 720)
    ]
    replay = Replay(spec, tasks)
    found = Coverage()
    for seed in range(repeats):
        calibration = replay.calibrate(NoiseSpec(**NOISE, seed=seed), budget_s=BUDGET_S)
        model = fit_cost_model(calibration)
        costs = model.predict(asked)
        found.costs += [costs[t].low_s <= true_matmul_s(spec, t) <= costs[t].high_s for t in asked]
        found.constant_errors += [p.error_fraction for p in recovered_constants(spec, model)]
        for row in recovered_crossovers(spec, calibration, model):
            assert row["known"], row
            low, high = row["low"] or 0.0, row["high"] or np.inf
            found.crossovers.append(low <= row["known"] <= high)
            pair = Pair(row["name"], row["known"], row["recovered"])
            found.crossover_errors.append(pair.error_fraction)
    return found


def test_stated_intervals_hold_about_as_often_as_they_say() -> None:
    found = coverage("desktop_fast_gpu", repeats=20)
    assert 0.80 <= np.mean(found.costs) <= 0.99
    assert 0.75 <= np.mean(found.crossovers) <= 1.0
    assert max(found.constant_errors) <= 0.05
    assert max(found.crossover_errors) <= 0.10


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["desktop_fast_gpu", "laptop_weak_gpu"])
def test_stated_90_per_cent_intervals_cover_the_truth_in_85_to_95_per_cent(name: str) -> None:
    found = coverage(name, repeats=400)
    costs, crossovers = np.mean(found.costs), np.mean(found.crossovers)
    print(f"{name}: costs covered {costs:.3f}, crossovers {crossovers:.3f}")
    assert 0.85 <= costs <= 0.95
    assert 0.85 <= crossovers <= 0.95
    assert max(found.constant_errors) <= 0.05
    assert max(found.crossover_errors) <= 0.10


@pytest.mark.usefixtures("basics_only")
def test_a_replayed_calibration_is_one_of_the_machine() -> None:
    spec = load_spec("laptop_weak_gpu")
    spec = dataclasses.replace(spec, cpu=dataclasses.replace(spec.cpu, cores=1))
    tasks = [task for task in calibration_tasks(("cpu", "emu:0"), 1, quick=True)]
    replay = Replay(spec, [task for task in tasks if task.op in BASICS])
    replayed = replay.calibrate(NoiseSpec(), budget_s=BUDGET_S).by_task
    real = calibrate_machine(spec, quick=True).by_task
    for task, measurement in replayed.items():
        assert measurement.median_s == pytest.approx(real[task].median_s, rel=1e-9), task
