"""Timing loops against a clock of known cost."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from autoplace import device
from autoplace.engines import NUMPY
from autoplace.measure.timing import (
    MIN_SAMPLES,
    MIN_SAMPLES_TO_JUDGE,
    Probe,
    Series,
    run_probe,
    timed_calls,
)
from autoplace.measurement import Task

TASK = Task(op="dispatch")


class FakeClock:
    """Time passes only when something is charged; each charge may be disturbed."""

    def __init__(self, seed: int = 0, sigma: float = 0.0) -> None:
        self.t = 100.0
        self.calls = 0
        self._rng = np.random.default_rng(seed)
        self._sigma = sigma

    def now(self) -> float:
        return self.t

    def charge(self, *, calls: int, flops: float, nbytes: float, seconds: float) -> None:
        self.calls += 1
        self.t += seconds * math.exp(self._sigma * self._rng.standard_normal())


def probe_of(seconds: float, *, first: float = 0.0, **kwargs: int) -> Probe:
    """A call that takes ``seconds``, the very first one ``first`` more."""
    state = {"extra": first}

    def call() -> None:
        device.charge(seconds=seconds + state["extra"])
        state["extra"] = 0.0

    return Probe(tasks=(TASK,), sample=timed_calls(call, "cpu"), **kwargs)


def run(probe: Probe, clock: FakeClock, **kwargs: float) -> Series:
    series = Series(tasks=probe.tasks)
    with device.use_clock(clock):
        run_probe(probe, series, **{"time_limit_s": 1.0, **kwargs})
    return series


def test_a_steady_call_is_timed_exactly() -> None:
    (measurement,) = run(probe_of(2e-3), FakeClock()).measurements()
    assert measurement.median_s == pytest.approx(2e-3, rel=1e-9)
    assert measurement.spread_fraction == pytest.approx(0, abs=1e-9)


def test_a_slow_first_call_is_no_part_of_the_result() -> None:
    (measurement,) = run(probe_of(2e-3, first=5.0), FakeClock()).measurements()
    assert max(measurement.times_s) == pytest.approx(2e-3)


def test_short_calls_are_grouped_until_a_sample_lasts_half_a_millisecond() -> None:
    series = run(probe_of(1e-6), FakeClock())
    assert series.calls == 500


def test_a_probe_that_needs_a_queue_gets_its_least_number_of_calls() -> None:
    assert run(probe_of(1.0, min_calls=8), FakeClock(), time_limit_s=0.1).calls == 8


def test_sampling_stops_as_soon_as_the_median_is_known() -> None:
    clock = FakeClock()
    series = run(probe_of(1e-3), clock, time_limit_s=1e9)
    assert len(series.times_s[0]) == MIN_SAMPLES_TO_JUDGE


def test_a_noisy_call_is_sampled_until_the_error_is_on_target() -> None:
    series = run(probe_of(1e-3), FakeClock(seed=3, sigma=0.1), time_limit_s=1e9)
    assert len(series.times_s[0]) > 20
    assert series.error_fraction <= 0.01


def test_the_time_limit_ends_sampling_but_never_before_three_samples() -> None:
    clock = FakeClock(sigma=0.5)
    series = run(probe_of(10.0), clock, time_limit_s=1.0)
    assert len(series.times_s[0]) == MIN_SAMPLES


def test_a_second_visit_adds_to_the_first() -> None:
    clock = FakeClock(seed=1, sigma=0.3)
    probe = probe_of(1e-2)
    series = run(probe, clock, time_limit_s=0.05)
    before = len(series.times_s[0])
    with device.use_clock(clock):
        run_probe(probe, series, time_limit_s=0.05)
    assert len(series.times_s[0]) > before


def test_a_step_with_several_timed_parts_gives_one_measurement_each() -> None:
    tasks = (Task(op="dispatch"), Task(op="launch"))
    probe = Probe(tasks=tasks, sample=lambda calls: (1e-3, 2e-3))
    first, second = run(probe, FakeClock(), time_limit_s=0.0).measurements()
    assert (first.task, first.median_s) == (tasks[0], 1e-3)
    assert (second.task, second.median_s) == (tasks[1], 2e-3)


def test_the_thread_count_is_put_back() -> None:
    import torch

    before = torch.get_num_threads()
    with device.torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_where_numpy_computes_torch_has_one_thread() -> None:
    import torch

    with device.torch_threads(2):
        with device.torch_threads(2, NUMPY):
            assert torch.get_num_threads() == 1
            assert all(library.get_num_threads() == 2 for library in device._numpy_libraries())
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize("seed", range(5))
def test_the_standard_error_that_is_stated_is_about_the_one_that_is_made(seed: int) -> None:
    misses = []
    for repeat in range(40):
        clock = FakeClock(seed=1000 * seed + repeat, sigma=0.05)
        probe = probe_of(1e-3)
        series = Series(tasks=probe.tasks)
        with device.use_clock(clock):
            run_probe(probe, series, time_limit_s=0.03)
        (measurement,) = series.measurements()
        misses.append((measurement.median_s / 1e-3 - 1) / measurement.error_fraction)
    # Normal theory puts 68 % within one standard error; few samples make that rough.
    assert 0.5 <= np.mean(np.abs(misses) < 1) <= 0.9


def test_threads_of_linear_algebra_sleep_soon_after_their_work() -> None:
    code = """
import autoplace, time
import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits
x = np.ones((512, 512), np.float32)
with threadpool_limits(2):
    for _ in range(3):
        x @ x
    blas = [i for i in threadpool_info() if i["internal_api"] == "openblas"]
    start_s = time.process_time()
    time.sleep(0.1)
    print(any(i["num_threads"] > 1 for i in blas), time.process_time() - start_s)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    is_meant, spun_s = done.stdout.split()
    if is_meant == "False":
        pytest.skip("numpy has no OpenBLAS with two threads here")
    assert float(spun_s) < 0.005  # of waiting in a loop; 0.02 and more by default
