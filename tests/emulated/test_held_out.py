"""Tasks that no calibration timed, on noiseless machines: predicted and held against the truth."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest

from autoplace.cost_model import fit_cost_model
from autoplace.measurement import Task
from autoplace.workload import NetworkSpec
from tests.emulated.machine import EmulatedMachine
from tests.emulated.recover import calibrate_on
from tests.emulated.spec import load_spec

SCRIPT = Path(__file__).parents[2] / "calibration" / "held_out.py"
_spec = importlib.util.spec_from_file_location("held_out", SCRIPT)
assert _spec is not None and _spec.loader is not None
held_out = importlib.util.module_from_spec(_spec)
sys.modules["held_out"] = held_out
_spec.loader.exec_module(held_out)

WIDE = NetworkSpec(observation_size=4096, hidden_sizes=(256, 256), action_size=6, continuous=False)


@pytest.mark.parametrize(
    ("name", "cores", "tasks"),
    [
        ("laptop_weak_gpu", 1, 60),
        pytest.param("desktop_fast_gpu", 12, 300, marks=pytest.mark.slow),
        pytest.param("unified_memory", 8, 300, marks=pytest.mark.slow),
    ],
)
def test_without_noise_held_out_tasks_are_predicted_closely(
    name: str, cores: int, tasks: int
) -> None:
    spec = load_spec(name)
    spec = dataclasses.replace(spec, cpu=dataclasses.replace(spec.cpu, cores=cores))
    with EmulatedMachine(spec, dry=True) as machine:
        calibration = calibrate_on(machine)
        chosen = held_out.held_out_tasks(calibration, tasks)
        model = fit_cost_model(calibration)
        trials = held_out.hold_out(model, chosen, passes=1, pass_s=0.0)
        # Observations four times as wide as any that was timed.
        wide = [Task(op="policy_step", network=WIDE, rows=rows) for rows in (1, 4, 16)]
        beyond = held_out.hold_out(model, wide, passes=1, pass_s=0.0)
    print(held_out.as_text(trials))
    found = held_out.summary(trials)
    assert found["median_error"] <= 0.03
    assert found["p90_error"] <= 0.08
    assert max(trial.error_fraction for trial in beyond) <= 0.08
