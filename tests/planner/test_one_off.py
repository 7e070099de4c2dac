"""What a run takes once is charged over its length; numbers are worked out by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from autoplace import store
from autoplace.close_calls import Verdict, decide
from autoplace.cost_model import CostModel, fit_cost_model
from autoplace.measurement import Calibration, Measurement, Task, env_start
from autoplace.planner.plan import Candidate, Placement, Plan
from autoplace.planner.ranking import SAME_SPEED_FRACTION
from autoplace.planner.search import make_plan
from autoplace.workload import EnvSpec, Hyperparameters, NetworkSpec, Workload

CARTPOLE = Workload(
    env=EnvSpec.make("CartPole-v1"),
    network=NetworkSpec(observation_size=4, hidden_sizes=(64, 64), action_size=2),
    hyperparameters=Hyperparameters(minibatch_rows=128),
    action_bytes=8,
)
REFERENCE = Path(__file__).parents[2] / "calibration" / "reference-2-cores.json"
START_S = 2.0


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    """Two cores, on which a process needs two seconds to start."""
    start = Measurement(task=Task(op="process_start"), times_s=(START_S,) * 5)
    return store.read_calibration(REFERENCE).with_measurements([start])


@pytest.fixture(scope="module")
def model(calibration: Calibration) -> CostModel:
    return fit_cost_model(calibration)


def candidate(**values: object) -> Candidate:
    placement = Placement(
        device="cpu",
        sample_device="cpu",
        learn_device="cpu",
        transfer_interval_steps=128,
        minibatch_rows=128,
        num_envs=8,
    )
    return Candidate(scheme="async", placement=placement, **values)  # type: ignore[arg-type]


def test_a_score_is_the_rate_of_the_whole_run_times_its_efficiency() -> None:
    found = candidate(env_steps_per_s=1e4, sample_efficiency=0.96, one_off_s=2.0)
    assert found.score == 9600  # a run without an end
    run = dataclasses.replace(found, total_steps=100_000)
    # 10 s of iterations and 2 s before them: 8,333 steps a second, each worth 0.96
    assert run.score == pytest.approx(8000)
    # 5 s and 2 s where 20,000 a second were measured
    assert run.score_at(2e4) == pytest.approx(100_000 / 7 * 0.96)
    assert Candidate.from_json(json.loads(json.dumps(run.to_json()))) == run
    old = {k: v for k, v in run.to_json().items() if k not in ("one_off_s", "total_steps")}
    assert Candidate.from_json(old) == candidate(env_steps_per_s=1e4, sample_efficiency=0.96)


def test_a_short_run_starts_no_process_and_a_long_one_does(
    calibration: Calibration, model: CostModel
) -> None:
    def plan(total_steps: int | None) -> Plan:
        return make_plan(calibration, CARTPOLE, model=model, total_steps=total_steps)

    endless = plan(None).best_of_schemes
    cpu, double = endless["cpu"], endless["double-buffer"]
    assert (cpu.one_off_s, double.one_off_s) == (0.0, START_S)
    assert double.score > cpu.score
    # Of two within 3 % that use as many threads the one without a policy lag is taken, `cpu`:
    # cpu.score = 0.97 efficiency / (1 / rate + 2 s / N), solved for N.
    least = 1 - SAME_SPEED_FRACTION
    seconds = least * double.sample_efficiency / cpu.score - 1 / double.env_steps_per_s
    pays_from = START_S / seconds
    short, long = plan(round(0.95 * pays_from)), plan(round(1.05 * pays_from))
    assert (short.scheme, long.scheme) == ("cpu", "double-buffer")
    for found, scheme_to in ((short, "double-buffer"), (long, "cpu")):
        flip = {f.parameter: f for f in found.flips}["total_steps"]
        assert (flip.scheme_from, flip.scheme_to) == (found.scheme, scheme_to)
        assert flip.to_value == pytest.approx(pays_from, rel=0.025)
    text = long.explain()
    assert "Starting the processes of double-buffer takes 2.00 s: a run of" in text
    assert "- start" in text and f"{long.chosen.total_steps:,} steps" in text
    assert "- start" not in plan(10**10).explain()
    assert Plan.from_json(json.loads(json.dumps(long.to_json()))).chosen == long.chosen


def test_processes_beyond_the_cores_start_one_after_the_other(
    calibration: Calibration, model: CostModel
) -> None:
    for samplers, turns in ((2, 1), (4, 2)):  # on two cores; the run itself learns
        plan = make_plan(
            calibration,
            CARTPOLE,
            model=model,
            scheme="async",
            placement={"num_workers": samplers},
            total_steps=100_000,
        )
        assert plan.chosen.one_off_s == turns * START_S


def test_a_process_without_torch_is_charged_what_such_a_one_takes(calibration: Calibration) -> None:
    light = Measurement(task=env_start(CARTPOLE.env), times_s=(0.5,))
    both = calibration.with_measurements([light])

    def plan(**fixed: object) -> Plan:
        return make_plan(both, CARTPOLE, placement=fixed, total_steps=100_000)

    def one_off_s(scheme: str, **fixed: object) -> float:
        return plan(**fixed).best_of_schemes[scheme].one_off_s

    numpy, eager = {"engine": "numpy", "sample_threads": 1}, {"engine": "eager"}
    assert one_off_s("double-buffer", **numpy) == 0.5  # a sampler
    assert one_off_s("double-buffer", **eager) == START_S  # a learner
    for samplers, starts in ((2, 1), (4, 2)):
        assert one_off_s("async", num_workers=samplers, **numpy) == starts * 0.5
        assert one_off_s("async", num_workers=samplers, **eager) == starts * START_S
    assert plan(**numpy).explain() == plan(**numpy).explain()


def test_a_calibration_without_that_time_charges_nothing(calibration: Calibration) -> None:
    timed = tuple(m for m in calibration.measurements if m.task.op != "process_start")
    old = dataclasses.replace(calibration, measurements=timed)
    endless, short = (make_plan(old, CARTPOLE, total_steps=n) for n in (None, 10_000))
    assert short.chosen.one_off_s == 0
    assert short.chosen == dataclasses.replace(endless.chosen, total_steps=10_000)
    assert short.flips == endless.flips


def test_a_race_is_decided_by_the_whole_run(calibration: Calibration, model: CostModel) -> None:
    plan = make_plan(calibration, CARTPOLE, model=model, total_steps=100_000)
    best = plan.best_of_schemes
    both = best["cpu"], best["double-buffer"]
    rates = {"cpu": 50_000.0, "double-buffer": 90_000.0}

    def winner(plan: Plan) -> str:
        verdict = Verdict(
            rates=tuple((c.scheme, c.placement, rates[c.scheme]) for c in plan.rivals),
            noise_fraction=0.01,
        )
        return decide(plan, verdict).scheme

    # 100,000 steps take 2 s against 1.11 s, and 2 s to start
    close = dataclasses.replace(plan, chosen=both[0], candidates=both, rivals=both)
    assert winner(close) == "cpu"
    both = tuple(dataclasses.replace(each, total_steps=10**7) for each in both)
    close = dataclasses.replace(plan, chosen=both[0], candidates=both, rivals=both)
    assert winner(close) == "double-buffer"
