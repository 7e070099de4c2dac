"""Regimes of products, fitted to what was timed (:mod:`autoplace.products`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from autoplace.measurement import Measurement
from autoplace.products import Regimes, terms_of

Array = NDArray[np.float64]

_ERROR = 0.05  # relative; misses beyond it count less and less
_ROUNDS = 8  # of weighing anew
_SEARCH_ROUNDS = 3
_OTHERS = 0.2  # weight of timings of the other regime, as a share
_MOST_STARTS = 3
_LEAST_ROWS = 10  # timings that a regime of its own takes
# What a regime may begin at a size of: exponents of m, k and n. The last one is that of short sums,
# which are not worth an algorithm of their own.
_SIZES = np.array(
    [
        *((1, 1, 1), (0, 1, 1), (1, 1, 0), (1, 0, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -1, 1)),
        (0, -1, 0),
    ],
    dtype=float,
)
_QUANTILES = np.linspace(0.04, 0.96, 14)
# Regimes that miss not even so much less than one alone are taken for chance.
_WORTH_A_REGIME = 0.95


class ProductModel(Protocol):
    """What tells the seconds of products."""

    def call_s(self, m: float, k: float, n: float) -> float:
        """Seconds of a call of such a product, apart from its work."""

    def work_s(self, m: float, k: float, n: float) -> float:
        """Seconds without those of the call."""


def fit_regimes(timed: Sequence[Measurement]) -> Regimes | None:
    """The regimes of some products; ``None`` where too few were timed."""
    single = [m for m in timed if m.task.shape[0] == 1]
    rows = [m for m in timed if m.task.shape[0] > 1]
    if len(rows) < 2 * _LEAST_ROWS:
        return None
    shapes = np.array([m.task.shape for m in rows], dtype=float)
    terms = np.array([terms_of(*shape) for shape in shapes])
    seconds = np.array([m.median_s for m in rows])
    starts: list[tuple[float, ...]] = []
    above = np.zeros(len(rows), dtype=bool)
    best = _fit(terms, seconds, _SEARCH_ROUNDS)[1]
    for _ in range(_MOST_STARTS):
        limit, found, grown = best * _WORTH_A_REGIME, None, above
        for exponents in _SIZES:
            sizes = np.prod(shapes**exponents, axis=1)
            for start in np.unique(np.quantile(sizes[~above], _QUANTILES)):
                reached = above | (sizes >= start)
                if min(reached.sum(), (~reached).sum()) < _LEAST_ROWS:
                    continue
                cost = sum(
                    _fit(terms, seconds, _SEARCH_ROUNDS, own)[1] for own in (reached, ~reached)
                )
                if cost < limit:
                    limit, best, grown = cost, cost, reached
                    found = (*exponents.tolist(), float(start))
        if found is None:
            break
        *exponents, start = found
        sizes = np.prod(shapes ** np.array(exponents), axis=1)
        start, best, above = _sharpened(terms, seconds, sizes, above, (start, best, grown))
        starts.append((*exponents, start))
    below_rates = _fit(terms, seconds, _ROUNDS, ~above)[0].tolist()
    above_rates = below_rates
    if starts:
        above_rates = _fit(terms, seconds, _ROUNDS, above)[0].tolist()
    line: list[float] = []
    if len(single) >= 2:
        numbers = np.array([terms_of(*m.task.shape)[:2] for m in single])
        rates, _ = _fit(numbers, np.array([m.median_s for m in single]), _ROUNDS)
        line = [*rates.tolist(), *[0.0] * (terms.shape[1] - len(rates))]
    return Regimes(tuple(line), tuple(starts), tuple(below_rates), tuple(above_rates))


def _sharpened(
    terms: Array,
    seconds: Array,
    sizes: Array,
    before: NDArray[np.bool_],
    found: tuple[float, float, NDArray[np.bool_]],
) -> tuple[float, float, NDArray[np.bool_]]:
    """The start near the one ``found`` that misses least: the middle of two timed sizes.

    Args:
        terms: of all products.
        seconds: likewise.
        sizes: likewise, of what a regime begins at.
        before: which are beyond an earlier start.
        found: start, what it misses, and which products reach it or are beyond an earlier one.

    Returns:
        The same of the start that misses least.
    """
    free = np.unique(sizes[~before])
    at = int(np.searchsorted(free, found[0]))
    near = math.ceil(len(free) / len(_QUANTILES))  # as far as the next of them
    splits = range(max(1, at - near), min(len(free), at + near + 1))
    better = []
    for start in (float(np.sqrt(free[i - 1] * free[i])) for i in splits):
        reached = before | (sizes >= start)
        if min(reached.sum(), (~reached).sum()) >= _LEAST_ROWS:
            cost = sum(_fit(terms, seconds, _SEARCH_ROUNDS, own)[1] for own in (reached, ~reached))
            better.append((start, cost, reached))
    return min(better, key=lambda entry: entry[1], default=found)


def _fit(
    terms: Array, seconds: Array, rounds: int, own: NDArray[np.bool_] | None = None
) -> tuple[Array, float]:
    """Rates at or above zero, and what they miss altogether (roots of relative errors).

    Only what is its ``own`` counts as missed; the rest draws rates weakly towards those of all.
    """
    relative = terms / seconds[:, None]
    scale = np.sqrt((relative**2).sum(axis=0))
    scale[scale == 0.0] = 1.0  # of a term that no shape has
    relative = relative / scale
    share = np.ones(len(seconds)) if own is None else np.where(own, 1.0, _OTHERS)
    soft = np.ones(len(seconds))
    for _ in range(rounds):
        weights = share / np.sqrt(soft)
        rates, _ = nnls(relative * weights[:, None], weights, maxiter=1000)
        misses = np.log(np.maximum(relative @ rates, 1e-9)) / _ERROR
        soft = np.sqrt(1 + misses**2)
    return rates / scale, float(np.sum((np.sqrt(soft) - 1)[share == 1.0]))


def misses(model: ProductModel, timed: Sequence[Measurement]) -> float:
    """By how much a model misses what was timed altogether (roots of relative errors).

    What is far out of line says no more than that it is.
    """
    found = [model.call_s(*m.task.shape) + model.work_s(*m.task.shape) for m in timed]
    off = np.log(np.array(found) / [m.median_s for m in timed]) / _ERROR
    return float(np.sum((1 + off**2) ** 0.25 - 1))
