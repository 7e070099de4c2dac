"""The sizes from which one side is faster than the other, with intervals.

With an accelerator the sides are the CPU (with so many threads) and the accelerator; on the CPU
alone they are one thread and several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autoplace.cost_model import Cost, CostModel
from autoplace.measurement import Calibration, Task
from autoplace.workload import NetworkSpec

_SMALLEST, _LARGEST, _PER_OCTAVE = 8, 4096, 4


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
    threads = sorted({m.task.threads for m in calibration.measurements if m.task.op == "matmul"})
    found = []
    for accelerator in model.devices[1:]:
        for count in dict.fromkeys((threads[0], threads[-1])):
            for residency in ("resident", "copied"):
                sides = _matmul("cpu", count), _matmul(accelerator, 1, residency)
                found.append(_crossover("matmul", calibration, model, *sides))
            sides = _update("cpu", count), _update(accelerator, 1)
            found.append(_crossover("update", calibration, model, *sides))
    if len(threads) > 1:
        for family, side in (("matmul", _matmul), ("update", _update)):
            sides = side("cpu", 1), side("cpu", threads[-1])
            found.append(_crossover(family, calibration, model, *sides))
    return tuple(found)


_Side = Callable[[int], Task]


def _matmul(on: str, threads: int, residency: str = "resident") -> _Side:
    return lambda size: Task(
        op="matmul", device=on, threads=threads, shape=(size, size, size), residency=residency
    )


def _update(on: str, threads: int) -> _Side:
    def task(size: int) -> Task:
        network = NetworkSpec(observation_size=17, hidden_sizes=(size, size), action_size=6)
        return Task(op="update", device=on, threads=threads, network=network, rows=256)

    return task


def _crossover(
    family: str, calibration: Calibration, model: CostModel, baseline: _Side, challenger: _Side
) -> Crossover:
    octaves = math.log2(_LARGEST / _SMALLEST)
    sizes = [
        round(_SMALLEST * 2 ** (step / _PER_OCTAVE))
        for step in range(int(octaves * _PER_OCTAVE) + 1)
    ]
    costs = model.predict([side(size) for side in (baseline, challenger) for size in sizes])
    ratios, widths = [], []
    for size in sizes:
        first, second = costs[baseline(size)], costs[challenger(size)]
        ratios.append(math.log(second.seconds / first.seconds))
        widths.append(math.hypot(_log_width(first), _log_width(second)))
    task, other = baseline(sizes[0]), challenger(sizes[0])
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
        size=_last_crossing(sizes, ratios),
        low=_last_crossing(sizes, [r - w for r, w in zip(ratios, widths, strict=True)]),
        high=_last_crossing(sizes, [r + w for r, w in zip(ratios, widths, strict=True)]),
        slower_below=slower[-1] if slower else None,
        faster_above=faster[0] if faster else None,
    )


def _log_width(cost: Cost) -> float:
    return math.log(cost.high_s / cost.low_s) / 2


def _last_crossing(sizes: Sequence[int], ratios: Sequence[float]) -> float | None:
    """The size after which the log-ratio stays negative, interpolated in log size."""
    for index in range(len(sizes) - 1, 0, -1):
        before, after = ratios[index - 1], ratios[index]
        if before > 0 >= after:
            share = before / (before - after)
            return float(sizes[index - 1] * (sizes[index] / sizes[index - 1]) ** share)
        if after > 0:
            return None
    return None


def _timed_ratios(
    calibration: Calibration, baseline: _Side, challenger: _Side
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
