"""Products in two regimes: what is fitted to a library with known rules tells it at other sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from autoplace.fit_products import fit_regimes, misses
from autoplace.measure.active import between_regimes
from autoplace.measurement import Measurement, Task
from autoplace.physics import Primitives
from autoplace.products import Regimes

Shape = tuple[int, int, int]


def library_s(m: int, k: int, n: int) -> float:
    """Small products as they stand; from 2^17 multiplications on the matrix is packed first."""
    if m == 1:
        return 0.5e-6 + 4e-11 * k * n
    if m * k * n < 2**17:
        return 0.6e-6 + 1.2e-11 * m * k * n
    return 2e-6 + 0.8e-11 * m * k * n + 4e-10 * k * n


def vectors_s(m: int, k: int, n: int) -> float:
    """The columns that whole vectors of 16 leave take vectors of 8, 4, 2 and 1, each a pass."""
    passes = (n % 16 >= 8) + (n % 8 >= 4) + (n % 4 >= 2) + n % 2
    return 0.6e-6 + 2.5e-11 * m * k * n + 4e-10 * m * k * passes


def timed(
    count: int, seed: int, library: Callable[[int, int, int], float] = library_s
) -> list[Measurement]:
    rng = np.random.default_rng(seed)
    shapes: set[Shape] = set()
    while len(shapes) < count:
        m, k, n = (round(2 ** rng.uniform(0, high)) for high in (10, 10, 10))
        shapes.add((m, k, n))
    return [
        Measurement(task=Task(op="matmul", shape=shape), times_s=(library(*shape),))
        for shape in sorted(shapes)
    ]


def test_a_library_that_packs_large_products_is_told_at_sizes_that_were_not_timed() -> None:
    regimes = fit_regimes(timed(120, seed=0))
    assert regimes is not None and regimes.starts
    unseen = timed(100, seed=1)
    errors = [
        abs((regimes.call_s(*m.task.shape) + regimes.work_s(*m.task.shape)) / m.median_s - 1)
        for m in unseen
    ]
    assert np.median(errors) < 0.03
    assert np.quantile(errors, 0.9) < 0.2
    alone = Regimes(regimes.single, (), regimes.above, regimes.above)
    assert misses(regimes, unseen) < 0.3 * misses(alone, unseen)


def short_sums_s(m: int, k: int, n: int) -> float:
    """A library that has an algorithm for small results, but not for those of short sums."""
    if m * n <= 1200 and k > 31:
        return 0.6e-6 + 1.2e-11 * m * k * n
    return 2e-6 + 0.8e-11 * m * k * n + 4e-10 * k * n


def test_two_conditions_of_an_algorithm_are_told_apart() -> None:
    regimes = fit_regimes(timed(200, 0, short_sums_s))
    assert regimes is not None
    starts = {tuple(exponents): start for *exponents, start in regimes.starts}
    assert starts[1, 0, 1] == pytest.approx(1200, rel=0.2)
    assert 1 / starts[0, -1, 0] == pytest.approx(31.5, rel=0.2)
    unseen = timed(100, 1, short_sums_s)
    alone = Regimes(regimes.single, (), regimes.above, regimes.above)
    assert misses(regimes, unseen) < 0.3 * misses(alone, unseen)


def test_a_change_of_algorithm_is_put_halfway_between_the_sizes_that_it_lies_between() -> None:
    rows = timed(120, seed=0)
    regimes = fit_regimes(rows)
    assert regimes is not None
    (*exponents, start), *_ = regimes.starts
    assert exponents == [1, 1, 1]
    sizes = sorted(math.prod(m.task.shape) for m in rows if m.task.shape[0] > 1)
    below = max(size for size in sizes if size < 2**17)
    above = min(size for size in sizes if size >= 2**17)
    assert start == pytest.approx(math.sqrt(below * above))


def test_the_gap_in_which_an_algorithm_changes_is_halved_until_it_is_small() -> None:
    rows = {m.task: m for m in timed(80, seed=3)}

    def gap() -> float:
        sizes = [math.prod(task.shape) for task in rows if task.shape[0] > 1]
        return min(s for s in sizes if s >= 2**17) / max(s for s in sizes if s < 2**17)

    at_first = gap()
    for _ in range(24):
        regimes = fit_regimes(list(rows.values()))
        assert regimes is not None
        primitives = Primitives(devices=("cpu",), regimes={("cpu", 1): regimes})
        more = between_regimes(SimpleNamespace(primitives=primitives), rows)  # type: ignore[arg-type]
        if not more:
            break
        rows |= {t: Measurement(task=t, times_s=(library_s(*t.shape),)) for t in more}
    assert not more
    assert gap() < 1.1 < at_first
    (*_, start), *_ = regimes.starts
    assert start == pytest.approx(2**17, rel=0.1)


def test_columns_that_fill_no_whole_vector_take_passes_of_their_own() -> None:
    regimes = fit_regimes(timed(120, 0, vectors_s))
    assert regimes is not None

    def seconds(m: int, k: int, n: int) -> float:
        return regimes.call_s(m, k, n) + regimes.work_s(m, k, n)

    for n in (8, 9, 15, 16, 17, 31, 64, 79):
        assert abs(seconds(256, 64, n) / vectors_s(256, 64, n) - 1) < 0.1
    assert seconds(256, 64, 15) > 3 * seconds(256, 64, 16)


def test_too_few_products_have_no_regimes() -> None:
    assert fit_regimes(timed(15, seed=0)) is None
