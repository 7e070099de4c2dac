"""Timings that contradict each other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autoplace import store
from autoplace.measure import calibrate as measuring
from autoplace.measure.doubts import describe_doubts, examine_products
from autoplace.measurement import Measurement, Task

CALIBRATIONS = Path(__file__).parents[2] / "calibration"


def product(size: int, seconds: float, **where: object) -> Measurement:
    task = Task(op="matmul", shape=(size,) * 3, **where)  # type: ignore[arg-type]
    return Measurement(task=task, times_s=(seconds,) * 5)


def gpu(**changed: float) -> list[Measurement]:
    """8 Tflop/s behind launches of 10 microseconds; ``s512`` is another time at that size."""
    sizes = (128, 256, 512, 1024, 2048)
    return [
        product(n, changed.get(f"s{n}", 1e-5 + 2 * n**3 / 8e12), device="cuda:0") for n in sizes
    ]


def sizes_of(found: list[Measurement]) -> list[int]:
    return [m.task.shape[0] for m in found]


def test_what_grows_as_it_should_is_in_no_doubt() -> None:
    assert examine_products(gpu()) == ([], [])
    # Launches so long that only the largest product is worth one.
    late = [product(n, 1e-2 + 2 * n**3 / 1e13, device="cuda:0") for n in (256, 512, 1024, 4096)]
    assert examine_products(late) == ([], [])
    assert describe_doubts([], []) == []


@pytest.mark.parametrize("path", sorted(CALIBRATIONS.glob("*.json")), ids=lambda path: path.stem)
def test_calibrations_of_named_machines_are_in_no_doubt(path: Path) -> None:
    assert examine_products(store.read_calibration(path).measurements) == ([], [])


@pytest.mark.parametrize("size", [512, 2048])
def test_a_rate_that_no_other_size_comes_near_to_is_impossible_and_said(size: int) -> None:
    # Symptom: 200,000 Tflop/s, the time to ask for a product without waiting for it.
    found = gpu(**{f"s{size}": 2 * size**3 / 2e17})
    impossible, odd = examine_products([*found, *(product(n, 1e-3) for n in (64, 128))])
    assert sizes_of(impossible) == [size] and odd == []
    (line,) = describe_doubts(impossible, odd)
    assert line.startswith("1 product was faster than this machine can be")
    assert f"({size} x {size} x {size} on cuda:0, 2e+05 Tflop/s), and left out" in line


def test_a_single_size_that_is_slower_than_a_larger_one_is_said() -> None:
    # Symptom: the first size of a sweep takes 11.4 ms, the next one 0.33 ms.
    impossible, odd = examine_products(gpu(s256=11.4e-3))
    assert impossible == [] and sizes_of(odd) == [256]
    (line,) = describe_doubts(impossible, odd)
    assert "1 product was timed at more than 2 x a larger one (256 x 256 x 256 on cuda:0, " in line
    assert "11.4 ms" in line and line.endswith("calibrate again")


def test_devices_threads_and_engines_are_each_judged_by_themselves() -> None:
    host = [product(n, 2 * n**3 / 4e10) for n in (64, 128, 256, 512)]
    two = [dataclasses.replace(m, task=dataclasses.replace(m.task, threads=2)) for m in host]
    assert examine_products([*host, *two, *gpu()]) == ([], [])


def test_a_calibration_leaves_out_what_is_impossible_and_warns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed = gpu(s512=1e-12)
    for step in ("first_visits", "explore", "second_visits", "refine"):
        monkeypatch.setattr(measuring._Session, step, lambda self, *rest: None)
    monkeypatch.setattr(measuring._Session, "measurements", lambda self: list(timed))
    monkeypatch.setattr(measuring, "measure_process_start", lambda **options: [])
    result = measuring.calibrate(devices="cpu", quick=True)
    assert [m.task.shape[0] for m in result.measurements] == [128, 256, 1024, 2048]
    assert any("faster than this machine can be" in line for line in result.warnings)
