"""Every example runs, as a user would run it, on sizes that fit a test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Each example with arguments that make it small, and something that it must print.
RUNS: dict[str, tuple[tuple[str, ...], str]] = {
    "quickstart.py": (("--steps", "4096", "--budget", "6"), "mean return over 20 episodes"),
    "callbacks.py": (
        ("--steps", "30000", "--target", "40", "--budget", "6"),
        "stopped after",
    ),
    "planner_api.py": ((), "Bottleneck:"),
    "add_scheme.py": (("--steps", "2048", "--budget", "4"), "predicted by the plan"),
    "custom_network.py": (("--steps", "2048", "--budget", "4"), "mean return of the last 100"),
    "sb3_handover.py": (("--steps", "2048", "--budget", "4"), "mean return in Stable-Baselines3"),
    "custom_env.py": (("--steps", "4096", "--budget", "6"), "mean return of the last 100"),
    "matmul_crossover.py": (("--size", "256"), "timed rightly"),
}


def run(path: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_no_example_is_left_out() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(RUNS)


@pytest.mark.parametrize("name", sorted(RUNS))
def test_the_example_runs(name: str) -> None:
    arguments, expected = RUNS[name]
    assert expected in run(ROOT / "examples" / name, *arguments)


def test_the_calibration_folders_script_prints_a_verdict() -> None:
    script = ROOT / "calibration" / "crossover.py"
    printed = run(script, "--max-size", "64", "--seconds", "0.05", "--threads", "1", "2")
    assert "faster" in printed


def test_every_stored_calibration_can_be_read_and_planned_with() -> None:
    from autoplace import fit_cost_model
    from autoplace.store import read_calibration

    files = sorted((ROOT / "calibration").glob("*.json"))
    assert files
    for file in files:
        calibration = read_calibration(file)
        assert fit_cost_model(calibration).devices[0] == "cpu"
        assert all("GPU-" not in a.uuid for a in calibration.machine.accelerators)
