"""Which tasks would tell the cost model most: those that it is least sure of.

The model states how well it knows the smooth part of every cost, and how those of different tasks
hang together. Tasks are picked one after the other: each time the one that is known worst, and then
all others are taken to be known as well as if that one had been timed (maximum-variance design;
Rasmussen and Williams 2006, eq. 2.24).

Where a library changes its algorithm for products costs are not smooth, and between the two timed
products that the change lies between either may be used. Those gaps are cut in four and in four
again, and some more products around them tell whether the change was found where it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from autoplace.cost_model import CostModel
from autoplace.engines import EAGER, NUMPY
from autoplace.measure.probes import timed_tasks
from autoplace.measurement import Task
from autoplace.products import Regimes, reaches

# Relative standard error of the smooth part of a cost that is good enough ...
SURE_ERROR = 0.02
# ... and of what one more timing tells of it: the task's own deviation included.
_TIMING_ERROR = 0.02
# Sizes whose ratio is less than this are close enough to where an algorithm changes. On either side
# of that so many are timed within such a factor: by one alone the model might be mistaken.
_CLOSE = 1.05
_AROUND, _AROUND_FACTOR = 4, 1.5
# Only products count there that take so many times as long by one algorithm as by the other; sizes
# that no change is one of are so large.
_CONTRAST, _FREE = 1.2, 128
_CUTS = (0.5, 0.25, 0.75)  # of a gap, in logarithms


def least_sure(model: CostModel, candidates: Sequence[Task], count: int) -> list[Task]:
    """At most ``count`` of the candidates, what would tell most first; none where all is known."""
    if not candidates:
        return []
    # Of a policy step on an accelerator the last part, the wait, is the hardest to foresee.
    _, covariance = model.joint([timed_tasks(task)[-1] for task in candidates])
    chosen: list[Task] = []
    for _ in range(min(count, len(candidates))):
        index = int(np.argmax(np.diag(covariance)))
        variance = float(covariance[index, index])
        if math.sqrt(max(variance, 0.0)) <= SURE_ERROR:
            break
        chosen.append(candidates[index])
        column = covariance[:, index].copy()
        covariance -= np.outer(column, column) / (variance + _TIMING_ERROR**2)
        covariance[index, index] = 0.0
    return chosen


def between_regimes(model: CostModel, timed: Collection[Task]) -> list[Task]:
    """Products near where a library changes its algorithm, of whose sizes too few were timed."""
    found: dict[Task, None] = {}
    tables = ((EAGER, model.primitives.regimes), (NUMPY, model.primitives.numpy_regimes))
    for engine, table in tables:
        for (on, threads), regimes in table.items():
            products = [
                task
                for task in timed
                if (task.op, task.residency, task.beside) == ("matmul", "resident", 0)
                and (task.device, task.threads, task.engine) == (on, threads, engine)
                and task.shape[0] > 1
            ]
            found.update(dict.fromkeys(_near_starts(regimes, products)))
    return [task for task in found if task not in timed]


def _near_starts(regimes: Regimes, products: Sequence[Task]) -> Iterator[Task]:
    """For each start of the later regime some between its neighbours, and some around it."""
    matters = [any(start[i] for start in regimes.starts) for i in range(3)]
    for index, (*exponents, start) in enumerate(regimes.starts):
        others = (*regimes.starts[:index], *regimes.starts[index + 1 :])
        sizes = {
            task: math.prod(s**e for s, e in zip(task.shape, exponents, strict=True))
            for task in products
            if not any(reaches(task.shape, other) for other in others)
            and regimes.contrast(*map(float, task.shape)) >= _CONTRAST
        }
        smaller = [task for task, size in sizes.items() if size < start]
        larger = [task for task, size in sizes.items() if size >= start]
        if not smaller or not larger:
            continue
        below, above = max(smaller, key=sizes.__getitem__), min(larger, key=sizes.__getitem__)
        wanted: list[tuple[float, Sequence[int]]] = []
        if sizes[above] >= _CLOSE * sizes[below]:
            for share in _CUTS:
                size = _between(sizes[below], sizes[above], share)
                pairs = zip(below.shape, above.shape, strict=True)
                wanted.append((size, [round(_between(*pair, share)) for pair in pairs]))
        if sum(sizes[task] <= start * _AROUND_FACTOR for task in larger) < _AROUND:
            wanted.append((start * math.sqrt(_AROUND_FACTOR), above.shape))
        if sum(sizes[task] >= start / _AROUND_FACTOR for task in smaller) < _AROUND:
            wanted.append((start / math.sqrt(_AROUND_FACTOR), below.shape))
        for size, shape in wanted:
            free = [s if m else _FREE for s, m in zip(shape, matters, strict=True)]
            yield dataclasses.replace(below, shape=_of_size(size, free, exponents))


def _between(first: float, second: float, share: float) -> float:
    """What divides the way between two numbers, in logarithms."""
    return float(first ** (1 - share) * second**share)


def _of_size(size: float, shape: Sequence[int], exponents: Sequence[float]) -> tuple[int, ...]:
    """A shape near one that has a size, as closely as whole numbers let it."""
    adjusted = list(shape)
    longest = max((i for i, e in enumerate(exponents) if e), key=adjusted.__getitem__)
    rest = math.prod(
        s**e for i, (s, e) in enumerate(zip(shape, exponents, strict=True)) if i != longest
    )
    adjusted[longest] = max(1, round((size / rest) ** (1 / exponents[longest])))
    return tuple(adjusted)
