"""Which readings of the sentinel are called a slow spell."""

from __future__ import annotations

import numpy as np
import pytest

from autoplace.measure.sentinel import find_slow_spell


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
