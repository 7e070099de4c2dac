"""Products in two regimes: what is fitted to a library with known rules tells it at other sizes."""

from __future__ import annotations

import numpy as np

from autoplace.fit_products import fit_regimes, misses
from autoplace.measurement import Measurement, Task
from autoplace.products import Regimes

Shape = tuple[int, int, int]


def library_s(m: int, k: int, n: int) -> float:
    """Small products as they stand; from 2^17 multiplications on the matrix is packed first."""
    if m == 1:
        return 0.5e-6 + 4e-11 * k * n
    if m * k * n < 2**17:
        return 0.6e-6 + 1.2e-11 * m * k * n
    return 2e-6 + 0.8e-11 * m * k * n + 4e-10 * k * n


def timed(count: int, seed: int) -> list[Measurement]:
    rng = np.random.default_rng(seed)
    shapes: set[Shape] = set()
    while len(shapes) < count:
        m, k, n = (round(2 ** rng.uniform(0, high)) for high in (10, 10, 10))
        shapes.add((m, k, n))
    return [
        Measurement(task=Task(op="matmul", shape=shape), times_s=(library_s(*shape),))
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


def test_too_few_products_have_no_regimes() -> None:
    assert fit_regimes(timed(15, seed=0)) is None
