"""What an engine takes once before it runs, and whether that pays over a run."""

from __future__ import annotations

import dataclasses

from autoplace.engines import TIMED_WHERE_NAMED
from autoplace.measurement import Calibration
from autoplace.planner.plan import Candidate, Placement
from autoplace.units import format_seconds
from autoplace.workload import NetworkSpec


def setup_s(calibration: Calibration, placement: Placement, network: NetworkSpec) -> float:
    """Seconds that the engine of a placement takes once, before it runs a network.

    What another network took, where that one was never timed.
    """
    if placement.engine not in TIMED_WHERE_NAMED:
        return 0.0
    timed = [
        m
        for m in calibration.measurements
        if m.task.op == "engine_setup" and m.task.engine == placement.engine
    ]
    of_network = [m for m in timed if m.task.network == network] or timed
    return sum(
        max((m.median_s for m in of_network if m.task.device == on), default=0.0)
        for on in {placement.sample_device, placement.learn_device}
    )


def without_engine(calibration: Calibration, engine: str) -> Calibration:
    """A calibration in which an engine was never timed."""
    kept = tuple(m for m in calibration.measurements if m.task.engine != engine)
    return dataclasses.replace(calibration, measurements=kept)


def why_it_costs_more(candidate: Candidate, instead: Candidate) -> str | None:
    """One line where a candidate's engine does not pay over its run; else ``None``.

    Args:
        candidate: with the engine.
        instead: the best one without it.
    """
    if candidate.score > instead.score:
        return None
    engine, other = candidate.placement.engine, instead.placement.engine
    if candidate.total_steps is None or candidate.env_steps_per_s <= instead.env_steps_per_s:
        why = "it is no faster"
    else:
        saved_s = candidate.total_steps * (
            1 / instead.env_steps_per_s - 1 / candidate.env_steps_per_s
        )
        why = (
            f"it takes {format_seconds(candidate.one_off_s)} once and saves "
            f"{format_seconds(saved_s)} over {candidate.total_steps:,} env steps"
        )
    return f"engine {engine} is dropped, the {other} engine runs instead: {why}"
