"""The script that compares calibrations of one machine."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest

from autoplace.crossover import Crossover
from autoplace.measurement import Calibration
from tests.synthetic import Truth, make_calibration

SCRIPT = Path(__file__).parents[1] / "calibration" / "repeat.py"
_spec = importlib.util.spec_from_file_location("repeat", SCRIPT)
assert _spec is not None and _spec.loader is not None
repeat = importlib.util.module_from_spec(_spec)
sys.modules["repeat"] = repeat
_spec.loader.exec_module(repeat)


def crossover(size: float | None, low: float | None, high: float | None) -> Crossover:
    return Crossover(
        family="matmul", dtype="float32", residency="resident", threads=1, baseline="a",
        challenger="b", size=size, low=low, high=high, slower_below=None, faster_above=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ((100, 95, 105), (109, 107, 111), True),  # within 10 %
        ((100, 95, 105), (112, 110, 114), False),
        ((100, 80, 130), (125, 90, 150), True),  # inside both
        ((100, 95, 130), (125, 110, 150), False),  # inside one of them
        ((None, None, None), (None, None, None), True),
        ((None, None, None), (300, 250, 350), False),
        ((None, 900, None), (1000, 800, None), True),  # beyond the range, perhaps
        ((9, None, 12), (11, None, 14), True),
    ],
)
def test_crossovers_agree_within_10_per_cent_or_inside_both_intervals(first, second, same):
    a, b = crossover(*first), crossover(*second)
    assert repeat.same_crossover(a, b) is same
    assert repeat.same_crossover(b, a) is same


def scaled(calibration: Calibration, threads: int, factor: float) -> Calibration:
    return dataclasses.replace(
        calibration,
        measurements=tuple(
            dataclasses.replace(m, times_s=tuple(factor * t for t in m.times_s))
            if m.task.threads == threads
            else m
            for m in calibration.measurements
        ),
    )


def test_calibrations_are_compared_by_crossovers_and_plans(monkeypatch):
    every = repeat.workloads()
    assert len(every) == len({workload for workload, _ in every}) * len(repeat.ENV_STEPS_S) == 40
    monkeypatch.setattr(repeat, "workloads", lambda: every[::13])
    base = make_calibration(Truth(), quick=True)
    said = repeat.say(base)
    found = repeat.compare([said, said, said])
    assert (found["same_crossovers"], found["same_plans"]) == (1.0, 1.0)
    assert found["crossover_pairs"] == 3 * len(said.crossovers) > 0
    other = repeat.say(scaled(base, threads=2, factor=1.5))
    assert repeat.compare([said, other])["same_crossovers"] < 1.0
    far = repeat.say(scaled(base, threads=2, factor=5.0))  # beyond what is called a tie
    found = repeat.compare([said, far])
    assert found["same_plans"] < 1.0
    text = repeat.as_text(found)
    assert text.count("apart") == len(found["crossovers_apart"]) + len(found["plans_apart"]) > 0
