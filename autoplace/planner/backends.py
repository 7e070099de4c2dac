"""Vector backends that the planner has to tell apart, by their names."""

from __future__ import annotations

from typing import Any

SPREAD = "process"  # worker processes step; they can do so in groups
JOINED = "joint"  # likewise, and the process that samples is one of them; in one group only


def num_started(placement: Any) -> Any:  # noqa: ANN401 - one placement or arrays of many
    """How many worker processes a placement starts."""
    return placement.num_workers - (placement.env_backend == JOINED)
