"""How well each median of a calibration is known, the spreads of all its tasks taken together.

Few samples that agree by chance would claim to be exact, and sampling that stops when they agree
makes such chances likely. So each task's variance is drawn towards the typical one, as strongly as
the variances of all tasks turn out to be alike (moderated variances; Smyth 2004): fully where they
differ no more than chance lets them, hardly where some tasks really are noisier than others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import digamma, polygamma

from autoplace.measurement import Measurement, Task

Array = NDArray[np.float64]

# What the median absolute deviation tells of the spread of normal samples, as a share of what their
# standard deviation tells (Rousseeuw and Croux 1993).
_MAD_EFFICIENCY = 0.37
_LEAST_SPREAD = 1e-4  # relative; no clock resolves less of a sample
_MOST_FREEDOM = 1e4  # degrees of freedom that are as good as infinitely many


def standard_errors(measurements: Iterable[Measurement]) -> dict[Task, float]:
    """Relative standard error of each median; times that nobody sampled are left out."""
    groups: dict[tuple[str, bool], list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        task = measurement.task
        if measurement.origin == "measured":
            groups[task.device, task.env is not None].append(measurement)
    errors: dict[Task, float] = {}
    for rows in groups.values():
        counts = np.array([float(m.num_samples) for m in rows])
        # As in Measurement.error_fraction.
        spreads = np.array([m.spread_fraction for m in rows]) * counts / (counts - 0.8)
        variances = _moderated(np.maximum(spreads, _LEAST_SPREAD) ** 2, counts)
        found = 1.2533 * np.sqrt(variances / counts)
        errors.update(zip((m.task for m in rows), found.tolist(), strict=True))
    return errors


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
