"""How much slower steps on the CPU run while other cores of the machine are busy.

Cores share caches, memory, power and often arithmetic units. A calibration times a few steps alone
and again while one, and while every, other core is kept busy; the ratio holds for all sizes of the
same step.

Where there are more processes at work than cores, operating systems do not share these out evenly
at once: a process stays for a while on the core that it started on, and two on one core take twice
as long. A calibration times how long it takes until all of c and of c + 1 processes are through on
c cores, for several lengths of work: with T seconds of the former, the ratio r(T) lies between
(c + 1) / c, all cores busy to the end, and 2; ``u(T)`` in 0..1 says where.

Nor does a process that a message wakes get a core at once where all are busy: it waits for a slice
of time to end. A calibration times a message and its answer beside as many busy processes as there
are cores; beside fewer there is a core to wake up on.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autoplace.measurement import Calibration

# The timed step that a stage is like.
_LIKE: Mapping[str, str] = {
    "env_step": "interpreter",
    "policy_step": "policy_step",
    "gae": "update",
    "update": "update",
    "handoff": "hand_over",
}


class Contention:
    """Ratios of a calibrated machine; all are 1 where it was never timed."""

    def __init__(self, calibration: Calibration) -> None:
        found: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for measurement in calibration.measurements:
            task = measurement.task
            alone = calibration.by_task.get(dataclasses.replace(task, beside=0))
            if task.beside and alone is not None:
                ratio = measurement.median_s / alone.median_s
                logs = found[task.op, task.threads]
                if task.op == "hand_over":
                    logs[task.beside - 1].append(0.0)
                logs[task.beside].append(math.log(ratio))
        # By (op, threads): the logarithm of the ratio by busy cores, 0 where none are.
        self._curves = {
            key: [(0, 0.0), *sorted((n, statistics.mean(logs)) for n, logs in by_busy.items())]
            for key, by_busy in found.items()
        }

        self._unevenness = _unevenness(calibration)

    def unevenness(self, work_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """``u`` of so many seconds of work; 0 where it was never timed.

        Beyond the longest that was timed, what is lost is lost once: it goes by one over the time.
        """
        if not self._unevenness:
            return np.zeros(np.shape(work_s))
        seconds, values = np.array(self._unevenness).T
        beyond = np.minimum(1.0, seconds[-1] / work_s)
        found: NDArray[np.float64] = np.interp(np.log(work_s), np.log(seconds), values) * beyond
        return found

    def factor(self, stage: str, threads: int, busy: int) -> float:
        """How many times as long a stage takes beside ``busy`` cores; at least 1.

        Args:
            stage: its name; one that is not like any that was timed is not slowed.
            threads: of the stage itself; the nearest that were timed count.
            busy: cores that other work keeps busy. Between those that were timed the logarithm is
                interpolated, beyond them it stays.
        """
        op = _LIKE.get(stage)
        counts = [count for name, count in self._curves if name == op]
        if op is None or not counts or not busy:
            return 1.0
        nearest = min(counts, key=lambda count: (abs(math.log(count / threads)), count))
        numbers, logs = zip(*self._curves[op, nearest], strict=True)
        return max(1.0, math.exp(float(np.interp(busy, numbers, logs))))


def _unevenness(calibration: Calibration) -> list[tuple[float, float]]:
    """(T, u(T)) of the lengths that were timed, in order.

    T goes by the length that as many processes as cores take least of, per unit of work: short ones
    are through before all of them have begun, or share a core by chance too.
    """
    crowds = {m.task: m for m in calibration.measurements if m.task.op == "crowd"}
    pairs = []
    for task, measurement in crowds.items():
        fewer = crowds.get(dataclasses.replace(task, workers=task.workers - 1))
        if fewer is not None:
            pairs.append((task, measurement.median_s, fewer.median_s))
    one_s = min((fewer_s / task.shape[0] for task, _, fewer_s in pairs), default=0.0)
    found = []
    for task, more_s, _ in pairs:
        alone_s = task.shape[0] * one_s
        even = task.workers / (task.workers - 1)
        share = (more_s / alone_s - even) / (2.0 - even)
        found.append((alone_s, min(max(share, 0.0), 1.0)))
    return sorted(found)
