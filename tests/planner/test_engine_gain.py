"""Engines that were timed for one network: where they are candidates, and when they pay."""

from __future__ import annotations

import dataclasses

import pytest

from autoplace.engines import COMPILE, EAGER, GRAPH
from autoplace.errors import UsageError
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.planner.engine_gain import setup_s, why_it_costs_more, without_engine
from autoplace.planner.plan import Plan
from autoplace.planner.search import make_plan
from autoplace.workload import Workload
from tests.planner.test_search import ENV, workload
from tests.synthetic import GPU, Truth, make_calibration

ONCE_S = 10.0


@pytest.fixture(scope="module")
def small() -> Workload:
    return workload(minibatch_rows=64)


@pytest.fixture(scope="module")
def timed(small: Workload) -> Calibration:
    """Two cores on which compiled steps take half of what eager ones do, after ten seconds."""
    truth = Truth()
    steps = [
        Task(op="policy_step", threads=t, network=small.network, rows=8, engine=COMPILE)
        for t in (1, 2)
    ]
    steps += [dataclasses.replace(task, op="update", rows=64) for task in steps]
    found = [
        Measurement(
            task=task, times_s=(truth.seconds(dataclasses.replace(task, engine=EAGER)) / 2,) * 9
        )
        for task in steps
    ]
    ready = [dataclasses.replace(t, op="engine_setup") for t in steps if t.op == "update"]
    found += [Measurement(task=task, times_s=(ONCE_S,)) for task in ready]
    return make_calibration(truth, env=ENV).with_measurements(found)


def plans(calibration: Calibration, of: Workload) -> tuple[Plan, Plan]:
    best = make_plan(calibration, of, max_policy_lag=0)
    return best, make_plan(without_engine(calibration, COMPILE), of, max_policy_lag=0)


def test_it_is_a_candidate_for_the_network_that_it_was_timed_with(
    timed: Calibration, small: Workload
) -> None:
    best, instead = plans(timed, small)
    assert (best.placement.engine, instead.placement.engine) == (COMPILE, EAGER)
    costs = {s.name: s for s in best.chosen.stages}
    assert costs["update"].source == costs["policy_step"].source == "measured"
    gae_s = {s.name: s.total_s for s in instead.chosen.stages}["gae"]
    assert costs["gae"].total_s == pytest.approx(gae_s, rel=1e-3)
    with pytest.raises(UsageError, match=r"--engine is one that was timed .* \(eager\), got comp"):
        make_plan(timed, workload(hidden_sizes=(32,)), placement={"engine": COMPILE})


def test_it_is_chosen_or_dropped_by_the_length_of_the_run(
    timed: Calibration, small: Workload
) -> None:
    best, instead = plans(timed, small)
    assert best.chosen.one_off_s == setup_s(timed, best.placement, small.network) == ONCE_S
    saved_s = 1 / instead.chosen.env_steps_per_s - 1 / best.chosen.env_steps_per_s
    even = ONCE_S / saved_s  # env steps after which it has paid
    for steps, engine in ((1.01 * even, COMPILE), (even / 2, EAGER)):
        free = make_plan(timed, small, max_policy_lag=0, total_steps=round(steps))
        assert free.placement.engine == engine
        asked, other = (
            make_plan(
                timed,
                small,
                max_policy_lag=0,
                placement={"engine": name},
                total_steps=round(steps),
            ).chosen
            for name in (COMPILE, EAGER)
        )
        reason = why_it_costs_more(asked, other)
        if engine == COMPILE:
            assert reason is None
        else:
            assert reason is not None and reason.startswith(
                "engine compile is dropped, the eager engine runs instead: it takes 10.0 s once "
                "and saves 5.00 s over "
            )
    assert why_it_costs_more(instead.chosen, best.chosen) == (
        "engine eager is dropped, the compile engine runs instead: it is no faster"
    )


def test_recorded_steps_are_candidates_on_the_accelerator_that_has_them() -> None:
    calibration = make_calibration(Truth(gpu=True), env=ENV)
    graphs = [
        dataclasses.replace(
            m,
            task=dataclasses.replace(m.task, engine=GRAPH),
            times_s=tuple(t / 3 for t in m.times_s),
        )
        for m in calibration.measurements
        if m.task.device == GPU and m.task.op in ("policy_step", "update")
    ]
    eager = make_plan(calibration, workload())
    plan = make_plan(calibration.with_measurements(graphs), workload(), scheme="gpu")
    assert plan.placement.engine == GRAPH
    assert {c.placement.engine for c in eager.candidates if c.placement} == {EAGER}
    on_the_cpu = [c for c in plan.candidates if c.placement and c.placement.learn_device == "cpu"]
    assert all(c.placement and c.placement.engine == EAGER for c in on_the_cpu)
