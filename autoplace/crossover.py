"""The sizes from which one side is faster than the other, with intervals.

With an accelerator the sides are the CPU (with so many threads) and the accelerator; on the CPU
alone they are one thread and several.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplace.cost_model import CostModel
from autoplace.measurement import Calibration, Task
from autoplace.workload import NetworkSpec

Array = NDArray[np.float64]

_PER_OCTAVE = 16
# Sizes at which crossovers are looked for, from 8 to 4096.
SIZES = tuple(dict.fromkeys(round(8 * 2 ** (i / _PER_OCTAVE)) for i in range(9 * _PER_OCTAVE + 1)))
_DRAWS = 1000  # of curves, for an interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """Where ``challenger``, slower for small sizes, becomes faster than ``baseline``.

    Attributes:
        family: ``matmul`` (square, size n) or ``update`` (one gradient step on 256 rows through two
            hidden layers, size their width).
        dtype: element type.
        residency: ``resident`` or ``copied``.
        threads: threads of the baseline on the CPU.
        baseline: the side that is faster for small sizes.
        challenger: the other side.
        size: where the fitted costs are equal; ``None`` where they never are within the range.
        low: lower end of the 90 % interval of the size; ``None`` below the range.
        high: upper end of the 90 % interval of the size; ``None`` above the range.
        slower_below: the largest timed size at which the challenger was slower.
        faster_above: the smallest timed size at which it was faster.
    """

    family: str
    dtype: str
    residency: str
    threads: int
    baseline: str
    challenger: str
    size: float | None
    low: float | None
    high: float | None
    slower_below: int | None
    faster_above: int | None

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field."""
        return {name: getattr(self, name) for name in self.__slots__}


def find_crossovers(calibration: Calibration, model: CostModel) -> tuple[Crossover, ...]:
    """Every crossover that the calibration can tell of."""
    return tuple(
        _crossover(family, calibration, model, baseline, challenger)
        for family, baseline, challenger in compared_sides(calibration, model)
    )


Side = Callable[[int], Task]  # the task of a size


def compared_sides(calibration: Calibration, model: CostModel) -> list[tuple[str, Side, Side]]:
    """(family, baseline, challenger) of each crossover, in the order they are found in."""
    threads = sorted({m.task.threads for m in calibration.measurements if m.task.op == "matmul"})
    compared: list[tuple[str, Side, Side]] = []
    for accelerator in model.devices[1:]:
        for count in dict.fromkeys((threads[0], threads[-1])):
            for residency in ("resident", "copied"):
                compared.append(  # noqa: PERF401 - three kinds in turn
                    ("matmul", _matmul("cpu", count), _matmul(accelerator, 1, residency))
                )
            compared.append(("update", _update("cpu", count), _update(accelerator, 1)))
    if len(threads) > 1:
        compared += [
            (family, side("cpu", 1), side("cpu", threads[-1]))
            for family, side in (("matmul", _matmul), ("update", _update))
        ]
    return compared


def _matmul(on: str, threads: int, residency: str = "resident") -> Side:
    return lambda size: Task(
        op="matmul", device=on, threads=threads, shape=(size, size, size), residency=residency
    )


def _update(on: str, threads: int) -> Side:
    def task(size: int) -> Task:
        network = NetworkSpec(observation_size=17, hidden_sizes=(size, size), action_size=6)
        return Task(op="update", device=on, threads=threads, network=network, rows=256)

    return task


def _crossover(
    family: str, calibration: Calibration, model: CostModel, baseline: Side, challenger: Side
) -> Crossover:
    tasks = [side(size) for side in (baseline, challenger) for size in SIZES]
    mean, covariance = model.joint(tasks)
    count = len(SIZES)
    ratios = mean[count:] - mean[:count]
    # Var(b - a) = Var b + Var a - Cov(a, b) - Cov(b, a)
    between = covariance[:count, count:]
    spread = covariance[count:, count:] + covariance[:count, :count] - between - between.T
    # At another time all sizes of a side may be slower or faster alike.
    visits = model.parameters.visits
    spread = spread + visits.of(tasks[0]) ** 2 + visits.of(tasks[-1]) ** 2
    low, high = _interval(ratios, spread)
    task, other = baseline(SIZES[0]), challenger(SIZES[0])
    timed = _timed_ratios(calibration, baseline, challenger)
    slower = [size for size, ratio in timed if ratio > 1]
    faster = [size for size, ratio in timed if ratio < 1 and (not slower or size > slower[-1])]
    return Crossover(
        family=family,
        dtype=task.dtype,
        residency=other.residency,
        threads=task.threads,
        baseline=_side_name(task),
        challenger=_side_name(other),
        size=_within_range(_last_crossing(ratios[None])[0]),
        low=_within_range(low),
        high=_within_range(high),
        slower_below=slower[-1] if slower else None,
        faster_above=faster[0] if faster else None,
    )


def _interval(ratios: Array, covariance: Array) -> tuple[float, float]:
    """The 90 % interval of the crossing, from curves drawn as they are known together."""
    values, vectors = np.linalg.eigh(covariance)
    draws = np.random.default_rng(0).standard_normal((_DRAWS, len(ratios)))
    curves = ratios + draws * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
    low, high = np.quantile(_last_crossing(curves), (0.05, 0.95), method="nearest")
    return float(low), float(high)


def _last_crossing(curves: Array) -> Array:
    """The size after which each curve of log-ratios ``[K, sizes]`` stays negative.

    Interpolated in log size; 0 where the curve always is, infinity where it is not at the end.
    """
    slower = curves > 0
    last = curves.shape[1] - 1 - slower[:, ::-1].argmax(axis=1)
    crossed = slower.any(axis=1) & (last < curves.shape[1] - 1)
    index = np.where(crossed, last, 0)
    rows = np.arange(len(curves))
    before, after = curves[rows, index], curves[rows, index + 1]
    sizes = np.log(SIZES)
    share = before / np.where(crossed, before - after, 1.0)
    found = np.exp(sizes[index] + share * (sizes[index + 1] - sizes[index]))
    return np.where(crossed, found, np.where(slower.any(axis=1), np.inf, 0.0))


def _within_range(size: float) -> float | None:
    return float(size) if 0 < size < math.inf else None


def _timed_ratios(
    calibration: Calibration, baseline: Side, challenger: Side
) -> list[tuple[int, float]]:
    """(size, challenger over baseline) at the sizes at which both sides were timed."""
    pairs = []
    for power in range(3, 13):
        first = calibration.by_task.get(baseline(2**power))
        second = calibration.by_task.get(challenger(2**power))
        if first is not None and second is not None:
            pairs.append((2**power, second.median_s / first.median_s))
    return pairs


def _side_name(task: Task) -> str:
    if task.device != "cpu":
        return task.device
    return f"cpu, {task.threads} thread" + ("s" if task.threads != 1 else "")
