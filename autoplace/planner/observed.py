"""Planning again with what a run has measured.

What a run saw of a stage says by what factor the model is off there, now, on this machine: every
prediction for the same op on the same device is scaled by it, and stays so while another plan is
run, until what is measured is again what the model says. Where the whole machine is slower or
faster, so are ops that the run does not use: on the CPU by the median of those that it does, on an
accelerator the part that the host has in them. A stage that is slow only because sampling and
learning get in each other's way says nothing about schemes in which they take turns, so those are
then costed as they were, and compared with what was measured.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from autoplace.cost_model import Cost, CostModel, fit_cost_model
from autoplace.device_names import CPU, is_accelerator
from autoplace.measurement import Calibration, Task
from autoplace.physics import physics
from autoplace.planner.memory import Limits
from autoplace.planner.plan import Plan, Stage
from autoplace.planner.search import make_plan
from autoplace.workload import Workload

# Ops that a stage consists of beside the one it is named after.
_AS = {"first_update": "update", "bookkeeping": "gae", "cold_policy_step": "policy_step"}
_AS_CALIBRATED = 0.15  # log-ratio within which a stage takes what the model says


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a run measured under a plan.

    Attributes:
        plan: that it followed.
        stage_s: seconds per iteration of each (stage, lane).
        is_machine_wide: whether the whole machine is slower or faster than it was calibrated.
        is_contention: whether sampling and learning slow each other down.
        slowdown: by device, how many times its calibrated time a task of the calibration takes.
    """

    plan: Plan
    stage_s: Mapping[tuple[str, str], float]
    is_machine_wide: bool = False
    is_contention: bool = False
    slowdown: Mapping[str, float] = dataclasses.field(default_factory=dict)


Factors = dict[tuple[str, str], float]  # measured over predicted by (op, device)
Replan = Callable[[Observed], Plan]


def make_replanner(
    calibration: Calibration,
    model: CostModel | None = None,
    *,
    scheme: str = "auto",
    max_policy_lag: int = 1,
    placement: Mapping[str, object] | None = None,
    limits: Limits | None = None,
) -> Replan:
    """A function that plans a run again; the arguments are those of :func:`make_plan`.

    The minibatch stays as it is: a run learns the same under whatever plan it goes on.
    """
    fitted = model if model is not None else fit_cost_model(calibration)
    known: Factors = {}

    def as_calibrated(plan: Plan, workload: Workload) -> tuple[Stage, ...]:
        """The stages of a plan, which may have been made under other factors, without any."""
        return make_plan(
            calibration,
            workload,
            scheme=plan.scheme,
            max_policy_lag=sys.maxsize,
            placement=plan.placement.to_json(),
            model=fitted,
        ).chosen.stages

    def replan(observed: Observed) -> Plan:
        workload = observed.plan.workload
        hyper = dataclasses.replace(
            workload.hyperparameters, minibatch_rows=observed.plan.placement.minibatch_rows
        )
        workload = dataclasses.replace(workload, hyperparameters=hyper)
        factors = _factors(observed, as_calibrated(observed.plan, workload))
        if all(abs(math.log(factor)) < _AS_CALIBRATED for factor in factors.values()):
            known.clear()
        known.update(factors)
        return make_plan(
            calibration,
            workload,
            scheme=scheme,
            max_policy_lag=0 if observed.is_contention else max_policy_lag,
            placement=placement,
            limits=limits,
            model=(fitted if observed.is_contention else ObservedModel(fitted, observed, known)),
        )

    return replan


class ObservedModel(CostModel):
    """A cost model whose predictions are scaled by what a run has measured."""

    def __init__(self, model: CostModel, observed: Observed, factors: Factors) -> None:
        """Scale ``model`` by ``factors``, and ops without one by what ``observed`` implies."""
        self.__dict__.update(model.__dict__)
        self._factors = factors
        self._observed = observed
        on_cpu = [f for (op, on), f in factors.items() if on == CPU and op != "hand_over"]
        self._cpu_factor = statistics.median(on_cpu) if on_cpu else 1.0

    def predict(self, tasks: Iterable[Task], *, within_run: bool = False) -> dict[Task, Cost]:
        """Cost each distinct task once, as it is now."""
        costs = super().predict(tasks, within_run=within_run)
        return {task: self._scaled(task, cost) for task, cost in costs.items()}

    def _scaled(self, task: Task, cost: Cost) -> Cost:
        op = _AS.get(task.op, task.op)
        factor = self._factors.get((op, task.device))
        if factor is None:
            factor = self._implied_factor(task) if self._observed.is_machine_wide else 1.0
        return dataclasses.replace(
            cost,
            seconds=cost.seconds * factor,
            low_s=cost.low_s * factor,
            high_s=cost.high_s * factor,
        )

    def _implied_factor(self, task: Task) -> float:
        if not is_accelerator(task.device) or task.op == "cold_policy_step":  # the host issues it
            return self._cpu_factor
        parts = physics(self.primitives, task)
        on_device = self._observed.slowdown.get(task.device, 1.0)
        host = [self._cpu_factor] * len(parts.host_s)
        device = [on_device] * (len(parts.device_s) + len(parts.tail_s))
        return parts.total_s([*host, *device]) / parts.unscaled_s


def _factors(observed: Observed, predicted: Iterable[Stage]) -> Factors:
    """Measured over predicted by (op, device)."""
    placement = observed.plan.placement
    where = {
        "env_step": ("env_step", CPU),
        "policy_step": ("policy_step", placement.sample_device),
        "obs_to_device": ("obs_to_device", placement.sample_device),
        "action_to_host": ("action_to_host", placement.sample_device),
        "gae": ("gae", placement.learn_device),
        "update": ("update", placement.learn_device),
        "weights_to_host": ("weights_to_host", placement.learn_device),
        "handoff": ("hand_over", CPU),
    }
    factors = {}
    for stage in predicted:
        measured_s = observed.stage_s.get((stage.name, stage.lane), 0.0)
        if stage.name in where and measured_s > 0 and stage.total_s > 0:
            factors[where[stage.name]] = measured_s / stage.total_s
    return factors
