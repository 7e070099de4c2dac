"""Other programs' work and a drifting clock are noticed, and nothing is where nothing was."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from autoplace.measure.grid import calibration_tasks
from autoplace.measurement import Calibration
from tests.emulated.replay import BASICS, Replay
from tests.emulated.spec import NoiseSpec, load_spec

# How many calibrations; two hundred take half a minute.
TRIES = (30, pytest.param(200, marks=pytest.mark.slow))
BUDGET_S = 6.0
NOISE = {"lognormal_sigma": 0.05, "outlier_fraction": 0.02, "outlier_factor": 20.0}


@pytest.fixture(scope="module")
def replay() -> Iterator[Replay]:
    spec = load_spec("laptop_weak_gpu")
    tasks = calibration_tasks(("cpu",), spec.cpu.cores)
    yield Replay(spec, [t for t in tasks if t.op in BASICS and max(t.shape, default=0) < 2048])


def is_flagged(calibration: Calibration) -> bool:
    return any("slower than at other times" in warning for warning in calibration.warnings)


@pytest.mark.parametrize("tries", TRIES)
def test_a_competing_load_is_flagged_in_95_of_100_tries(replay: Replay, tries: int) -> None:
    flagged = 0
    for seed in range(tries):
        rng = random.Random(seed)
        length_s = rng.uniform(0.2, 0.6) * BUDGET_S
        start_s = rng.uniform(0.0, 0.9 * BUDGET_S - length_s)
        cores = rng.uniform(0.5, 4.0)

        def load(now_s: float, start_s=start_s, length_s=length_s, cores=cores) -> float:  # type: ignore[no-untyped-def]
            return cores if start_s <= now_s < start_s + length_s else 0.0

        calibration = replay.calibrate(
            NoiseSpec(**NOISE, seed=seed), budget_s=BUDGET_S, competing_load=load
        )
        flagged += is_flagged(calibration)
    assert flagged >= 0.95 * tries


@pytest.mark.parametrize("tries", TRIES)
def test_a_quiet_machine_is_doubted_in_no_more_than_2_of_100_tries(
    replay: Replay, tries: int
) -> None:
    alarms = sum(
        is_flagged(replay.calibrate(NoiseSpec(**NOISE, seed=seed), budget_s=BUDGET_S))
        for seed in range(tries)
    )
    assert alarms <= 0.02 * tries


def test_a_drifting_clock_is_flagged_and_said_in_numbers(replay: Replay) -> None:
    noise = NoiseSpec(**NOISE, drift_per_s=0.05, seed=1)
    (warning,) = (w for w in replay.calibrate(noise, budget_s=BUDGET_S).warnings if "slower" in w)
    assert "from second" in warning
