"""Plans made again with what a run has measured."""

from __future__ import annotations

import dataclasses

import pytest

from autoplace.cost_model import CostModel, fit_cost_model
from autoplace.measurement import Calibration, Task
from autoplace.planner.observed import Observed, ObservedModel, _factors, make_replanner
from autoplace.planner.plan import Plan
from autoplace.planner.search import make_plan
from autoplace.workload import NetworkSpec
from tests.planner.test_search import ENV, workload
from tests.synthetic import GPU, Truth, make_calibration


@pytest.fixture(scope="module")
def desktop() -> Calibration:
    return make_calibration(Truth(gpu=True), env=ENV)


@pytest.fixture(scope="module")
def workstation() -> Calibration:
    """An accelerator about as fast as its CPU, whose work the host issues in next to no time."""
    truth = Truth(gpu=True, gpu_flops=5e10, gpu_dispatch_s=1e-6, gpu_launch_s=1e-6)
    return make_calibration(truth, env=ENV)


LOADED = {"env_step": 5.0, "policy_step": 5.0, "gae": 5.0, "update": 5.0}


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
    seen = Observed(plan=plan, stage_s=times)
    observed = ObservedModel(model, seen, _factors(seen, plan.chosen.stages))
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
    workstation: Calibration,
) -> None:
    work = workload(hidden_sizes=(512, 512), minibatch_rows=256)
    plan = make_plan(workstation, work, max_policy_lag=0)
    assert plan.scheme == "cpu"
    replan = make_replanner(workstation, max_policy_lag=0)
    slow = scaled(plan, **LOADED)
    moved = replan(Observed(plan=plan, stage_s=slow, is_machine_wide=True))
    assert moved.placement.learn_device == GPU
    assert plan.chosen.iteration_s < moved.chosen.iteration_s < 5 * plan.chosen.iteration_s
    same = make_replanner(workstation, max_policy_lag=0)(Observed(plan=plan, stage_s=scaled(plan)))
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


def test_what_was_seen_of_one_plan_is_remembered_under_the_next_until_all_is_well_again(
    workstation: Calibration,
) -> None:
    work = workload(hidden_sizes=(512, 512), minibatch_rows=256)
    plan = make_plan(workstation, work, max_policy_lag=0)
    replan = make_replanner(workstation, max_policy_lag=0)
    moved = replan(Observed(plan=plan, stage_s=scaled(plan, **LOADED), is_machine_wide=True))
    # Under the new plan all is as it predicts, but for the environment: the CPU is still loaded.
    there = scaled(moved, env_step=1.5)
    stays = replan(Observed(plan=moved, stage_s=there, is_machine_wide=True))
    assert stays.scheme == moved.scheme != plan.scheme
    env_s = {stage.name: stage.total_s for stage in stays.chosen.stages}["env_step"]
    assert env_s == pytest.approx(there["env_step", "sampler"], rel=0.01)
    # The load is gone: the stages take what the calibration says.
    quiet = make_plan(workstation, work, scheme=moved.scheme, placement=moved.placement.to_json())
    back = replan(Observed(plan=moved, stage_s=scaled(quiet)))
    assert (back.scheme, back.placement) == (plan.scheme, plan.placement)


def test_an_accelerator_is_slower_by_the_hosts_share_of_the_work(
    desktop: Calibration, model: CostModel
) -> None:
    plan = make_plan(desktop, workload(minibatch_rows=128), scheme="cpu", model=model)
    slow = scaled(plan, env_step=20.0, policy_step=20.0, gae=20.0, update=20.0)
    seen = Observed(plan=plan, stage_s=slow, is_machine_wide=True)
    observed = ObservedModel(model, seen, _factors(seen, plan.chosen.stages))

    def factor(width: int, rows: int) -> float:
        network = NetworkSpec(observation_size=16, hidden_sizes=(width, width), action_size=4)
        task = Task(op="update", device=GPU, network=network, rows=rows)
        return observed.predict([task])[task].seconds / model.predict([task])[task].seconds

    assert 5 < factor(32, 64) <= 20  # launches, which the host issues
    assert 1 <= factor(4096, 8192) < 1.5  # arithmetic


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
        model=ObservedModel(model, observed, _factors(observed, plan.chosen.stages)),
    )
    before = make_plan(desktop, plan.workload, scheme="gpu", model=model)
    for now, then in zip(other.chosen.stages, before.chosen.stages, strict=True):
        if now.name != "wait" and now.name == then.name:
            factor = 5.0 if now.name == "env_step" else 1.0
            assert now.total_s == pytest.approx(factor * then.total_s, rel=1e-6)
