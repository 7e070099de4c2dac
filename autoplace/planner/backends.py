"""Vector backends that the planner has to tell apart, by their names."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from autoplace.device_names import CPU
from autoplace.engines import NUMPY, engine_on

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


# Fields of a placement that say which processes it starts.
STARTING_FIELDS = (
    "env_backend",
    "num_workers",
    "learn_device",
    "max_policy_lag",
    "engine",
    "sample_threads",
)


class Started(NamedTuple):
    """Processes that a run starts.

    ``env_workers`` step environments and ``light_samplers`` act by numpy in addition; neither
    imports torch, as ``torch_samplers`` and ``learners`` do.
    """

    env_workers: int = 0
    light_samplers: int = 0
    torch_samplers: int = 0
    learners: int = 0

    @property
    def with_torch(self) -> int:
        """Those that import torch."""
        return self.torch_samplers + self.learners

    @property
    def without_torch(self) -> int:
        """Those that do not, all of which make environments."""
        return self.env_workers + self.light_samplers

    @property
    def with_envs(self) -> int:
        """Those that make environments."""
        return self.without_torch + self.torch_samplers


def started_by(placement: Any, *, is_plain: bool) -> Started:  # noqa: ANN401
    """The processes that one placement starts.

    Args:
        placement: what has the fields :data:`STARTING_FIELDS`.
        is_plain: whether the network is a perceptron on plain vectors.
    """
    has_workers = placement.env_backend in (SPREAD, JOINED)
    is_light = engine_on(placement.engine, CPU, is_plain=is_plain) == NUMPY
    samplers = placement.num_workers if samples_apart(placement) else 0
    env_workers = int(num_started(placement)) if has_workers else 0
    learners = int(starts_other_side(placement))
    acts_in_one = is_light and placement.sample_threads == 1 and not has_workers
    if learners and placement.learn_device == CPU and acts_in_one:
        return Started(light_samplers=1)  # which starts sooner than a learner
    if is_light:
        return Started(env_workers, samplers, 0, learners)
    return Started(env_workers, 0, samplers, learners)
