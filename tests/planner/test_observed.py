"""Plans made again with what a run has measured."""

from __future__ import annotations

import dataclasses

import pytest

from autoplace.cost_model import CostModel, fit_cost_model
from autoplace.measurement import Calibration
from autoplace.planner.observed import Observed, ObservedModel, make_replanner
from autoplace.planner.plan import Plan
from autoplace.planner.search import make_plan
from tests.planner.test_search import ENV, workload
from tests.synthetic import GPU, Truth, make_calibration


@pytest.fixture(scope="module")
def desktop() -> Calibration:
    return make_calibration(Truth(gpu=True), env=ENV)


@pytest.fixture(scope="module")
def model(desktop: Calibration) -> CostModel:
    return fit_cost_model(desktop)


def scaled(plan: Plan, **factors: float) -> dict[tuple[str, str], float]:
    """Stage times of a run in which some stages took several times what was predicted."""
    return {
        (stage.name, stage.lane): stage.total_s * factors.get(stage.name, 1.0)
        for stage in plan.chosen.stages
    }


def test_the_same_placement_is_then_predicted_to_take_what_it_took(
    desktop: Calibration, model: CostModel
) -> None:
    work = workload(hidden_sizes=(64, 64), minibatch_rows=256)
    plan = make_plan(desktop, work, scheme="cpu", model=model)
    times = scaled(plan, env_step=3.0, policy_step=1.5, gae=0.8, update=1.2)
    observed = ObservedModel(model, Observed(plan=plan, stage_s=times))
    given = {
        name: value
        for name, value in plan.placement.to_json().items()
        if name in ("env_backend", "num_workers", "sample_threads", "learn_threads")
    }
    again = make_plan(desktop, work, scheme="cpu", model=observed, placement=given)
    for stage in again.chosen.stages:
        if stage.name != "wait":
            assert stage.total_s == pytest.approx(times[stage.name, stage.lane])


def test_a_cpu_that_is_loaded_moves_the_learning_to_the_accelerator(
    desktop: Calibration, model: CostModel
) -> None:
    work = workload(hidden_sizes=(64, 64), minibatch_rows=128)
    plan = make_plan(desktop, work, max_policy_lag=0, model=model)
    assert plan.scheme == "cpu"
    replan = make_replanner(desktop, model, max_policy_lag=0)
    slow = scaled(plan, env_step=20.0, policy_step=20.0, gae=20.0, update=20.0)
    moved = replan(Observed(plan=plan, stage_s=slow, is_machine_wide=True))
    assert moved.placement.learn_device == GPU
    assert moved.chosen.iteration_s < sum(
        seconds for (name, lane), seconds in slow.items() if name != "wait"
    )
    same = replan(Observed(plan=plan, stage_s=scaled(plan)))
    assert (same.scheme, same.placement) == (plan.scheme, plan.placement)


def test_the_minibatch_stays_as_it_is_whatever_the_planner_would_choose(
    desktop: Calibration, model: CostModel
) -> None:
    plan = make_plan(desktop, workload(hidden_sizes=(512, 512)), model=model)
    rows = plan.placement.minibatch_rows
    replan = make_replanner(desktop, model)
    for factor in (0.1, 1.0, 10.0):
        again = replan(Observed(plan=plan, stage_s=scaled(plan, update=factor)))
        assert again.placement.minibatch_rows == rows


def test_contention_speaks_only_of_schemes_that_overlap(
    desktop: Calibration, model: CostModel
) -> None:
    work = workload(minibatch_rows=256)
    plan = make_plan(desktop, work, scheme="double-buffer", model=model)
    slow = scaled(plan, env_step=2.0, policy_step=2.0, update=2.0)
    again = make_replanner(desktop, model)(Observed(plan=plan, stage_s=slow, is_contention=True))
    assert again.placement.max_policy_lag == 0
    quiet = make_plan(desktop, work, max_policy_lag=0, model=model)
    assert again.chosen.iteration_s == pytest.approx(quiet.chosen.iteration_s)


def test_an_environment_of_its_own_pace_leaves_everything_else_as_it_was(
    desktop: Calibration, model: CostModel
) -> None:
    plan = make_plan(desktop, workload(minibatch_rows=256), scheme="cpu", model=model)
    observed = Observed(plan=plan, stage_s=scaled(plan, env_step=5.0))
    other = make_plan(
        desktop,
        dataclasses.replace(plan.workload),
        scheme="gpu",
        model=ObservedModel(model, observed),
    )
    before = make_plan(desktop, plan.workload, scheme="gpu", model=model)
    for now, then in zip(other.chosen.stages, before.chosen.stages, strict=True):
        if now.name != "wait" and now.name == then.name:
            factor = 5.0 if now.name == "env_step" else 1.0
            assert now.total_s == pytest.approx(factor * then.total_s, rel=1e-6)
