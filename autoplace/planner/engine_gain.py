"""Whether an engine that takes long to make ready pays for itself over a run."""

from __future__ import annotations

import dataclasses

from autoplace.measurement import Calibration
from autoplace.planner.plan import Plan
from autoplace.units import format_seconds


def setup_s(calibration: Calibration, plan: Plan) -> float:
    """Seconds that the plan's engine takes once, before it runs the plan's network."""
    placement, network = plan.placement, plan.workload.network
    on = {placement.sample_device, placement.learn_device}
    times: dict[str, float] = {}
    for measurement in calibration.measurements:
        task = measurement.task
        if (
            task.op == "engine_setup"
            and task.network == network
            and task.engine == placement.engine
            and task.device in on
        ):
            times[task.device] = max(times.get(task.device, 0.0), measurement.median_s)
    return sum(times.values())


def without_engine(calibration: Calibration, engine: str) -> Calibration:
    """A calibration in which an engine was never timed."""
    kept = tuple(m for m in calibration.measurements if m.task.engine != engine)
    return dataclasses.replace(calibration, measurements=kept)


def why_it_costs_more(
    calibration: Calibration, plan: Plan, instead: Plan, total_steps: int
) -> str | None:
    """One line where a plan's engine takes more once than it saves over a run; else ``None``.

    Args:
        calibration: with what the engine takes once.
        plan: with the engine.
        instead: the best one without it.
        total_steps: env steps of the run.
    """
    once_s = setup_s(calibration, plan)
    saved_s = total_steps * (1 / instead.chosen.env_steps_per_s - 1 / plan.chosen.env_steps_per_s)
    if saved_s > once_s:
        return None
    engine = plan.placement.engine
    gain = f"saves {format_seconds(saved_s)}" if saved_s > 0 else "saves nothing"
    return (
        f"engine {engine} is dropped: it takes {format_seconds(once_s)} once and {gain} over "
        f"{total_steps:,} env steps, the {instead.placement.engine} engine runs instead"
    )
