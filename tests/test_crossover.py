"""Crossovers of machines whose costs are known."""

from __future__ import annotations

import dataclasses

import pytest

from autoplace.cost_model import fit_cost_model
from autoplace.crossover import Crossover, find_crossovers
from autoplace.measurement import Episodes, Task
from autoplace.report import describe_calibration
from autoplace.workload import EnvSpec
from tests.synthetic import GPU, Truth, make_calibration


def crossovers(truth: Truth) -> dict[tuple[str, str, int, str], Crossover]:
    calibration = make_calibration(truth)
    found = find_crossovers(calibration, fit_cost_model(calibration))
    return {(c.family, c.residency, c.threads, c.challenger): c for c in found}


def true_size(truth: Truth, residency: str, threads: int) -> int:
    """The first size from which the accelerator stays faster."""
    for size in range(2000, 8, -1):
        shape = (size, size, size)
        on_cpu = truth.seconds(Task(op="matmul", threads=threads, shape=shape))
        there = truth.seconds(Task(op="matmul", device=GPU, shape=shape, residency=residency))
        if there > on_cpu:
            return size + 1
    return 8


@pytest.mark.parametrize("residency", ["resident", "copied"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_matmul_crossover_is_the_true_one(residency: str, threads: int) -> None:
    truth = Truth(gpu=True)
    found = crossovers(truth)["matmul", residency, threads, GPU]
    assert found.size == pytest.approx(true_size(truth, residency, threads), rel=0.05)
    assert found.low <= found.size <= found.high


def test_copies_and_more_threads_both_push_the_crossover_up() -> None:
    found = crossovers(Truth(gpu=True))
    sizes = {key[1:3]: c.size for key, c in found.items() if key[0] == "matmul" and key[3] == GPU}
    assert sizes["copied", 1] > sizes["resident", 1]
    assert sizes["resident", 2] > sizes["resident", 1]


def test_the_timed_sizes_on_both_sides_are_named_as_evidence() -> None:
    found = crossovers(Truth(gpu=True))["matmul", "copied", 1, GPU]
    assert found.slower_below < found.size < found.faster_above


def test_where_visits_differ_a_crossover_is_known_less_well() -> None:
    calibration = make_calibration(Truth(gpu=True))
    revisited = [
        dataclasses.replace(
            m,
            # One visit 10 % above the other, which of them in turn: the median is the same.
            times_s=tuple(m.times_s[0] * (0.95 if (index + n) % 2 else 1.05) for n in (0, 0, 1, 1)),
            visits=(2, 2),
        )
        for index, m in enumerate(calibration.measurements)
    ]
    widths = []
    for timed in (calibration, calibration.with_measurements(revisited)):
        found = find_crossovers(timed, fit_cost_model(timed))
        crossover = next(c for c in found if c.family == "matmul" and c.residency == "copied")
        assert crossover.low is not None and crossover.high is not None
        widths.append(crossover.high / crossover.low)
    # Visits 10 % apart are known to 0.1 / sqrt(2) / 1.645 = 4.3 %, on either side of the crossover.
    assert widths[1] > 1.05 > 1.005 > widths[0]


def test_with_one_device_the_sides_are_thread_counts() -> None:
    found = crossovers(Truth())
    assert {c.baseline for c in found.values()} == {"cpu, 1 thread"}
    assert {c.challenger for c in found.values()} == {"cpu, 2 threads"}


def test_an_accelerator_that_never_wins_has_no_crossover() -> None:
    slow = Truth(gpu=True, gpu_flops=1e9, gpu_bytes=1e9)
    found = crossovers(slow)["matmul", "resident", 1, GPU]
    assert found.size is None
    assert found.faster_above is None


def test_the_text_shows_each_crossover_and_the_errors() -> None:
    calibration = make_calibration(Truth(gpu=True))
    model = fit_cost_model(calibration)
    found = find_crossovers(calibration, model)
    text = describe_calibration(calibration, found, model.error_fractions)
    for crossover in found:
        if crossover.size is not None:
            assert f"{crossover.size:.0f}" in text
    assert "matmul@cuda:0" in text


def test_the_text_shows_what_is_known_of_each_environment() -> None:
    calibration = make_calibration(Truth(), env=EnvSpec.make("Known-v0"), env_step_s=1e-4)
    measurements = [
        dataclasses.replace(
            m,
            episodes=Episodes(end_s=3e-5, steps=21.4, timed_ends=0.05, limit=500),
            cold_s=(("eager", 2e-5),),
        )
        if m.task.op == "env_step" and m.task.num_envs == 8
        else m
        for m in calibration.measurements
    ]
    text = describe_calibration(
        dataclasses.replace(calibration, measurements=tuple(measurements)), (), {}
    )
    rows = [line.split() for line in text.splitlines() if line.startswith("Known-v0")]
    assert [row[2] for row in rows] == ["1", "8", "64"]
    assert (
        rows[1][3:5] == ["805", "µs"] and " ".join(rows[1][7:]) == "21 steps 30.0 µs eager 20.0 µs"
    )
    assert rows[0][7:] == ["-", "-", "-"]
    assert "Vector steps" not in describe_calibration(make_calibration(Truth()), (), {})
