"""Vector backends that the planner has to tell apart, by their names."""

from __future__ import annotations

from typing import Any

import numpy as np

from autoplace.device_names import CPU

SPREAD = "process"  # worker processes step; they can do so in groups
JOINED = "joint"  # likewise, and the process that samples is one of them; in one group only


def num_started(placement: Any) -> Any:  # noqa: ANN401 - one placement or arrays of many
    """How many worker processes a placement starts."""
    return placement.num_workers - (placement.env_backend == JOINED)


def samples_apart(placement: Any) -> Any:  # noqa: ANN401
    """Whether its workers are processes that sample, each at its own pace."""
    spread = np.logical_or(placement.env_backend == SPREAD, placement.env_backend == JOINED)
    return np.logical_and(placement.num_workers > 0, np.logical_not(spread))


def starts_other_side(placement: Any) -> Any:  # noqa: ANN401
    """Whether one process more is started, that learns or samples, than step environments."""
    in_own = np.logical_and(placement.learn_device == CPU, samples_apart(placement))
    return np.logical_and(placement.max_policy_lag > 0, np.logical_not(in_own))
