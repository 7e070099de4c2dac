"""Our side beside Stable-Baselines3's, in turns: speed, memory, and time to a return.

    python -m pytest -m bench -s tests/benchmarks/test_against_sb3.py

Nothing else should run meanwhile. Plans with the stored calibration.
"""

from __future__ import annotations

import compileall
import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("stable_baselines3") is None,
        reason="stable_baselines3 is not installed: pip install 'autoplace[test]'",
    ),
]
ROOT = Path(__file__).parents[2]
ROUNDS, SECONDS, SEEDS = 5, 6, 15
TIE = 0.02  # of memory, which repeats to one in a hundred


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Both sides start from bytecode, as installing leaves it, and ours with its model fitted."""
    for folder in ("autoplace", "tests/benchmarks"):
        assert compileall.compile_dir(ROOT / folder, quiet=1)
    result("time_to_return", "--total-steps", 1)


def result(module: str, *arguments: object) -> dict[str, Any]:
    """What a benchmark printed last, run in a process of its own."""
    command = [sys.executable, "-m", f"tests.benchmarks.{module}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    print(done.stdout.strip())
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def ratio(key: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """Ours over theirs, of the medians."""
    medians = [statistics.median(row[key] for row in rows) for rows in (ours, theirs)]
    found = medians[0] / medians[1]
    print(f"{key}: {medians[0]:g} against {medians[1]:g}, ratio {found:.2f}")
    return found


@pytest.mark.parametrize("lag", [1, 0])
@pytest.mark.parametrize(
    ("workload", "needs", "least"),
    [
        ("W1", "gymnasium", 4.0),
        ("W2", "mujoco", 2.2),
        ("W3", "mujoco", 1.8),
        ("W4", "ale_py", 1.25),
    ],
)
def test_whole_iterations_are_faster_in_no_more_memory(
    workload: str, needs: str, least: float, lag: int
) -> None:
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    ours, theirs = [], []
    work = ("--workload", workload, "--seconds", SECONDS)
    for _ in range(ROUNDS):
        ours.append(result("throughput", *work, "--max-policy-lag", lag))
        theirs.append(result("sb3", *work))
    ratio("peak_rss_mb", ours, theirs)
    memory = ratio("peak_pss_mb", ours, theirs)
    faster = ratio("env_steps_per_s", ours, theirs)
    assert faster >= (least if lag else 1.0)
    assert memory <= 1.0 + TIE


def test_in_one_process_it_takes_no_more_memory() -> None:
    work = ("--workload", "W1", "--seconds", 2)
    ours = [result("throughput", *work, "--scheme", "cpu", "--max-policy-lag", 0)]
    assert ratio("peak_rss_mb", ours, [result("sb3", *work)]) <= 1.0


def test_cartpole_is_solved_in_half_the_time_with_a_quarter_of_the_training() -> None:
    ours, theirs = [], []
    for seed in range(SEEDS):
        ours.append(result("time_to_return", "--seed", seed))
        theirs.append(result("sb3", "--solve", "--seed", seed))
    assert all(row["reached"] for row in (*ours, *theirs))
    training, total = ratio("train_s", ours, theirs), ratio("total_s", ours, theirs)
    assert (training <= 0.25, total <= 0.5) == (True, True), (training, total)
