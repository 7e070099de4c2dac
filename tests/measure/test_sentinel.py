"""Which readings of the sentinel are called a slow spell."""

from __future__ import annotations

import numpy as np
import pytest

from autoplace import device
from autoplace.measure import sentinel
from autoplace.measure.sentinel import Sentinel, find_slow_spell
from autoplace.measure.timing import Probe, timed_calls
from autoplace.measurement import Task
from tests.measure.test_timing import FakeClock


def readings(count: int = 100, seed: int = 0, spread: float = 0.02) -> np.ndarray:
    return 1e-3 * np.exp(spread * np.random.default_rng(seed).standard_normal(count))


def test_a_spell_is_found_where_it_was_and_measured() -> None:
    times = readings()
    times[40:60] *= 1.3
    spell = find_slow_spell(np.arange(100) * 0.5, times)
    assert spell is not None
    assert spell.start_s == pytest.approx(20, abs=1)
    assert spell.end_s == pytest.approx(30, abs=1)
    assert spell.slowdown_fraction == pytest.approx(0.3, abs=0.03)


def test_a_machine_that_was_slow_most_of_the_time_was_slow_not_fast() -> None:
    times = readings()
    times[30:] *= 1.2
    spell = find_slow_spell(np.arange(100.0), times)
    assert spell is not None
    assert (spell.start_s, spell.end_s) == (
        pytest.approx(30, abs=2),
        pytest.approx(99, abs=2),
    )


@pytest.mark.parametrize("spread", [0.0, 0.001, 0.05])
def test_readings_that_differ_by_chance_are_no_spell(spread: float) -> None:
    found = [
        find_slow_spell(np.arange(100.0), readings(seed=seed, spread=spread)) for seed in range(50)
    ]
    assert sum(spell is not None for spell in found) <= 1


def test_single_outliers_are_no_spell() -> None:
    times = readings()
    times[[10, 50, 80]] *= 1000
    assert find_slow_spell(np.arange(100.0), times) is None


def test_few_readings_prove_nothing() -> None:
    assert find_slow_spell([0.0, 1.0, 2.0], [1.0, 2.0, 3.0]) is None


def test_a_spell_of_a_hundred_times_makes_readings_no_rarer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock(sigma=0.02)

    def build(task: Task) -> Probe:
        def call() -> None:
            seconds = 0.016 if 4.0 <= clock.t - 100.0 < 6.0 else 0.00016
            device.charge(seconds=seconds)

        return Probe(tasks=(task,), sample=timed_calls(call, "cpu"))

    monkeypatch.setattr(sentinel, "build_probe", build)
    moments: list[float] = []
    with device.use_clock(clock):
        watched = Sentinel(2, 10.0)
        while clock.t < 110.0:
            device.charge(seconds=0.02)  # a task
            before_s = clock.t
            watched.look()
            if clock.t > before_s:
                moments.append(before_s - 100.0)
        spell = watched.slow_spell()
    # Every 0.1 s and a task's length; a slow one takes 0.05 s on top, the first of a few samples.
    assert sum(moment < 4.0 for moment in moments) == pytest.approx(34, abs=6)
    assert sum(4.0 <= moment < 6.0 for moment in moments) >= 10
    assert sum(6.1 <= moment < 10.0 for moment in moments) == pytest.approx(33, abs=6)
    assert spell is not None
    assert (spell.start_s, spell.end_s) == (pytest.approx(4, abs=0.2), pytest.approx(6, abs=0.3))
