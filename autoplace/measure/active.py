"""Which tasks would tell the cost model most: those that it is least sure of.

The model states how well it knows the smooth part of every cost, and how those of different tasks
hang together. Tasks are picked one after the other: each time the one that is known worst, and then
all others are taken to be known as well as if that one had been timed (maximum-variance design;
Rasmussen and Williams 2006, eq. 2.24).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoplace.cost_model import CostModel
from autoplace.measure.probes import timed_tasks
from autoplace.measurement import Task

# Relative standard error of the smooth part of a cost that is good enough ...
SURE_ERROR = 0.02
# ... and of what one more timing tells of it: the task's own deviation included.
_TIMING_ERROR = 0.02


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
