"""How well each median of a calibration is known, the spreads of all its tasks taken together.

Few samples that agree by chance would claim to be exact, and sampling that stops when they agree
makes such chances likely. So each task's variance is drawn towards the typical one, as strongly as
the variances of all tasks turn out to be alike (moderated variances; Smyth 2004): fully where they
differ no more than chance lets them, hardly where some tasks really are noisier than others.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import digamma, polygamma

from autoplace.correction import Z90
from autoplace.measurement import INTERFERED, Measurement, Task
from autoplace.model_parameters import VisitErrors

Array = NDArray[np.float64]

# What the median absolute deviation tells of the spread of normal samples, as a share of what their
# standard deviation tells (Rousseeuw and Croux 1993).
_MAD_EFFICIENCY = 0.37
_MEDIAN_VARIANCE = 1.2533**2  # of a median, times the samples, over that of a sample
_PAIRS_FOR_HALF = 20  # of visits of one kind, whose say is worth one half
_MOST_APART = math.log(INTERFERED)
_LEAST_SPREAD = 1e-4  # relative; no clock resolves less of a sample
_MOST_FREEDOM = 1e4  # degrees of freedom that are as good as infinitely many


def standard_errors(measurements: Iterable[Measurement]) -> tuple[dict[Task, float], VisitErrors]:
    """Relative standard error of each median, and what another visit may differ by.

    Times that nobody sampled are left out.
    """
    groups: dict[tuple[str, bool], list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        task = measurement.task
        if measurement.origin == "measured":
            groups[task.device, task.env is not None].append(measurement)
    spreads: dict[Measurement, float] = {}
    for rows in groups.values():
        # Every visit takes one degree of freedom.
        counts = np.array([float(m.num_samples + 1 - len(m.visit_medians_s)) for m in rows])
        found = np.array([m.visit_spread_fraction for m in rows])
        variances = _moderated(np.maximum(found, _LEAST_SPREAD) ** 2, counts)
        spreads.update(zip(rows, np.sqrt(variances).tolist(), strict=True))
    between = _visit_errors(spreads)
    errors: dict[Task, float] = {}
    for measurement, spread in spreads.items():
        visits = measurement.visits or (measurement.num_samples,)
        sampled = _MEDIAN_VARIANCE * spread**2 * sum(1 / n for n in visits) / len(visits)
        variance = (sampled + between.of(measurement.task) ** 2) / len(visits)
        errors[measurement.task] = math.sqrt(variance)
    return errors, between


def _visit_errors(spreads: Mapping[Measurement, float]) -> VisitErrors:
    """What visits of the same task differ by beyond what their samples explain.

    It goes by what 90 % of the differences keep within, as the intervals do: now and then visits
    differ by far more than usual. Of other programs' work, which takes any number of times as long,
    no more counts than makes it known as such.
    """
    differences: dict[tuple[str, str, str, bool], list[tuple[float, float]]] = defaultdict(list)
    for m, spread in spreads.items():
        task = m.task
        for (first, second), (few, more) in zip(
            itertools.pairwise(m.visit_medians_s), itertools.pairwise(m.visits), strict=True
        ):
            sampled = _MEDIAN_VARIANCE * spread**2 * (1 / few + 1 / more)
            kind = task.op, task.device, task.engine, task.threads > 1
            differences[kind].append((min(abs(math.log(second / first)), _MOST_APART), sampled))
    everything = _typical([pair for found in differences.values() for pair in found], 0.0)
    by_device = {
        (device, is_threaded): _typical(
            [
                pair
                for (_, other, _, threaded), found in differences.items()
                if (other, threaded) == (device, is_threaded)
                for pair in found
            ],
            everything,
        )
        for _, device, _, is_threaded in differences
    }
    by_kind = {
        kind: _typical(found, by_device[kind[1], kind[3]]) for kind, found in differences.items()
    }
    return VisitErrors(by_kind, by_device)


def _typical(pairs: Sequence[tuple[float, float]], others: float) -> float:
    """Standard error of one visit, from (difference of two, its variance by samples alone).

    Few are drawn towards what ``others`` differ by.
    """
    if not pairs:
        return others
    differences, sampled = np.array(pairs).T
    most = float(np.quantile(differences, 0.9, method="median_unbiased")) / Z90
    own = max(most**2 - float(np.median(sampled)), 0.0) / 2
    share = len(pairs) / (len(pairs) + _PAIRS_FOR_HALF)
    return math.sqrt(share * own + (1 - share) * others**2)


def _moderated(variances: Array, counts: Array) -> Array:
    """Variances drawn towards the one that all have in common."""
    known = counts > 2
    if known.sum() < 3:
        return variances
    freedom = np.maximum(_MAD_EFFICIENCY * (counts - 1), 0.1)
    half = freedom[known] / 2
    logs = np.log(variances[known]) - digamma(half) + np.log(half)
    excess = np.var(logs, ddof=1) - np.mean(polygamma(1, half))
    prior = _inverse_trigamma(excess) * 2 if excess > 0 else _MOST_FREEDOM
    # Weighted by samples: those of which few were taken may have agreed by chance.
    mean = float(np.average(logs, weights=freedom[known]))
    common = math.exp(mean + digamma(prior / 2) - math.log(prior / 2))
    return np.asarray((prior * common + freedom * variances) / (prior + freedom))


def _inverse_trigamma(value: float) -> float:
    low, high = 1e-3, _MOST_FREEDOM / 2
    if value <= polygamma(1, high):
        return high
    if value >= polygamma(1, low):
        return low
    return float(brentq(lambda x: polygamma(1, x) - value, low, high))
