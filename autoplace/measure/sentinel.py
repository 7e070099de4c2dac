"""A task that is timed again and again, to tell when the machine was not itself.

Between the visits of a calibration the same product is timed on all usable CPUs, where another
program's work shows first. A spell in which it was slower than at other times means competing load
or a drifting clock, and every task that was timed then is in doubt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from autoplace import device
from autoplace.measure.probes import build_probe
from autoplace.measure.timing import MIN_SAMPLE_S
from autoplace.measurement import Task

Array = NDArray[np.float64]

_SIZE = 256  # of the product: short, and large enough for every thread to have a part
# No more readings than this in a calibration, and of a quiet one's time no more than this share.
_MOST_READINGS = 300
_TIME_SHARE = 0.1
# A reading takes some slices of time, since others get their share slice by slice, and goes by the
# samples that waited for theirs, of which there are several only then. A slow one ends early.
_READING_S = 0.01
_QUANTILE = 0.9
_LEAST_SAMPLES = 5
_LONGEST = 4.0  # as a multiple of the usual
_LEAST_CALL_S = 1e-9  # however coarse the clock
_OVERDUE = 4.0  # intervals
_FALSE_ALARMS = 0.01  # share of quiet calibrations that may be doubted
_LEAST_READINGS = 8
_LEAST_SLOWDOWN = 0.05  # what is slower by less is not worth a word
_LEAST_RUN = 3  # readings in a spell
_MOST_SPREADS = 5.0
_LEAST_SPREAD = 0.002  # of readings, relative


@dataclass(frozen=True, slots=True)
class Spell:
    """A time in which the machine was slower than at other times.

    Attributes:
        start_s: its beginning, in seconds since the first reading.
        end_s: its end.
        slowdown_fraction: by how much the sentinel's time was longer.
    """

    start_s: float
    end_s: float
    slowdown_fraction: float


def task_of(threads: int) -> Task:
    """What the sentinel of a machine with so many usable CPUs times."""
    return Task(op="matmul", threads=threads, shape=(_SIZE,) * 3)


class Sentinel:
    """Readings of one task over a calibration.

    Args:
        threads: usable CPUs.
        duration_s: how long the calibration may take.
    """

    def __init__(self, threads: int, duration_s: float) -> None:
        self._task = task_of(threads)
        self._least_interval_s = self._interval_s = duration_s / _MOST_READINGS
        self._probe = build_probe(self._task)
        self._call_s = 0.0  # while nothing interferes
        self._moments_s: list[float] = []
        self._readings_s: list[float] = []

    def look(self) -> None:
        """Take a reading if it is time for one."""
        now_s = device.now()
        if self._moments_s and now_s < self._moments_s[-1] + self._interval_s:
            return
        with device.torch_threads(self._task.threads):
            if not self._moments_s:
                self._probe.sample(1)  # pays for cold caches
                self._call_s = max(*self._probe.sample(1), _LEAST_CALL_S)
            calls = max(1, round(MIN_SAMPLE_S / self._call_s))
            samples = max(_LEAST_SAMPLES, round(_READING_S / (calls * self._call_s)))
            usual_s = samples * calls * self._call_s
            end_s = device.now() + _LONGEST * usual_s
            taken: list[float] = []
            while len(taken) < samples and (not taken or device.now() < end_s):
                taken += self._probe.sample(calls)
        self._call_s = max(min(self._call_s, *taken), _LEAST_CALL_S)
        # The usual time sets the pace: a spell makes readings longer and must not make them fewer.
        self._interval_s = max(self._least_interval_s, usual_s / _TIME_SHARE)
        self._moments_s.append(now_s)
        self._readings_s.append(float(np.quantile(taken, _QUANTILE, method="lower")))

    @property
    def is_overdue(self) -> bool:
        """Whether the last reading is so long ago that a spell might be missed."""
        return bool(self._moments_s) and (
            device.now() > self._moments_s[-1] + _OVERDUE * self._interval_s
        )

    def slow_spell(self) -> Spell | None:
        """The most striking spell, if there is one."""
        return find_slow_spell(self._moments_s, self._readings_s)


def find_slow_spell(moments_s: Sequence[float], readings_s: Sequence[float]) -> Spell | None:
    """The run of readings that differs most from the others, if not by chance.

    Every run is compared with all other readings (a scan statistic); the spread comes from
    neighbouring readings, which a spell hardly touches, and no single reading counts for more than
    five spreads. The threshold is Student's, shared among all runs.
    """
    count = len(readings_s)
    if count < _LEAST_READINGS:
        return None
    logs = np.log(readings_s)
    spread = 1.4826 * float(np.median(np.abs(np.diff(logs)))) / np.sqrt(2.0)
    spread = max(spread, _LEAST_SPREAD)
    usual = np.median(logs)
    clipped = np.clip(logs, usual - _MOST_SPREADS * spread, usual + _MOST_SPREADS * spread)
    sums = np.concatenate([[0.0], np.cumsum(clipped)])
    starts, ends = np.triu_indices(count + 1, k=1)
    inside = ends - starts
    proper = np.minimum(inside, count - inside) >= _LEAST_RUN
    starts, ends, inside = starts[proper], ends[proper], inside[proper]
    outside = count - inside
    total = sums[ends] - sums[starts]
    difference = total / inside - (sums[-1] - total) / outside
    scores = difference / (spread * np.sqrt(1 / inside + 1 / outside))
    best = int(np.argmax(np.abs(scores)))
    # A median absolute difference tells about 0.37 as much as a standard deviation.
    limit = -stdtrit(0.37 * (count - 1), _FALSE_ALARMS / (2 * len(scores)))
    is_inside = np.zeros(count, dtype=bool)
    is_inside[starts[best] : ends[best]] = True
    levels = np.median(logs[is_inside]) - np.median(logs[~is_inside])
    slowdown = float(np.expm1(abs(levels)))
    if abs(scores[best]) <= limit or slowdown < _LEAST_SLOWDOWN:
        return None
    first, last = int(starts[best]), int(ends[best]) - 1
    if difference[best] < 0:
        # The spell is what is left: before the fast run or behind it, whichever is longer.
        first, last = (0, first - 1) if first > count - 1 - last else (last + 1, count - 1)
    return Spell(
        start_s=moments_s[first] - moments_s[0],
        end_s=moments_s[min(last + 1, count - 1)] - moments_s[0],
        slowdown_fraction=slowdown,
    )
