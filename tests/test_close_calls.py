"""Close calls: who is raced, when that pays, what it changes, and that it is kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autoplace import close_calls, store
from autoplace.close_calls import Verdict, decide, keep_verdict, kept_verdict, names, pays
from autoplace.planner.explain import explain_plan
from autoplace.planner.plan import Candidate, Plan
from autoplace.race import Raced, RaceResult
from tests.synthetic import make_machine
from tests.train.plans import make_plan as hand_made

MACHINE = make_machine()


def candidate(scheme: str, rate: float, *, width: float = 1.05, lag: int = 0) -> Candidate:
    """So many env steps/s predicted, of iterations of 1000 that are ``width`` uncertain."""
    chosen = hand_made(scheme=scheme).chosen
    seconds = 1000 / rate
    stages = tuple(dataclasses.replace(stage, total_s=seconds / 3) for stage in chosen.stages)
    return dataclasses.replace(
        chosen,
        placement=dataclasses.replace(chosen.placement, max_policy_lag=lag),
        iteration_s=seconds,
        low_s=seconds / width,
        high_s=seconds * width,
        env_steps_per_s=rate,
        stages=stages,
    )


CPU, DOUBLE = candidate("cpu", 1000.0), candidate("double-buffer", 980.0, lag=1)
GPU, HYBRID = candidate("gpu", 970.0), candidate("hybrid", 900.0)


@pytest.fixture
def tie() -> Plan:
    return dataclasses.replace(
        hand_made(),
        chosen=CPU,
        candidates=(CPU, DOUBLE, GPU, HYBRID),
        runner_up=DOUBLE,
        margin_fraction=0.02,
        is_close=True,
        reasons=("cpu is predicted to run 1,000 env steps/s",),
        rivals=(CPU, DOUBLE, GPU),
    )


def verdict(*rates: tuple[Candidate, float], noise: float = 0.01) -> Verdict:
    return Verdict(
        rates=tuple((c.scheme, c.placement, rate) for c, rate in rates), noise_fraction=noise
    )


def test_rivals_are_named_by_what_tells_them_apart() -> None:
    larger = dataclasses.replace(
        CPU, placement=dataclasses.replace(CPU.placement, minibatch_rows=512)
    )
    rows = CPU.placement.minibatch_rows
    assert names((CPU, DOUBLE)) == ["cpu", "double-buffer"]
    found = names((CPU, DOUBLE, larger))
    assert found == [f"cpu (minibatch {rows})", "double-buffer", "cpu (minibatch 512)"]


def test_a_race_is_run_only_where_it_is_a_small_share_of_the_run(tie: Plan) -> None:
    # Three rivals of 1 s an iteration: 4 turns of 2, 3 and 2 iterations, twice as long with all
    # that is around: 2 (8 + 12.2 + 8.2) = 57 s. That is 2 % of 2850 s, or 2.85 million steps.
    assert not pays(tie, 2_700_000)
    assert pays(tie, 3_000_000)


def test_the_measurement_decides_and_says_so(tie: Plan) -> None:
    plan = decide(tie, verdict((CPU, 900.0), (DOUBLE, 1100.0), (GPU, 500.0)))
    assert plan.chosen == DOUBLE
    assert plan.candidates[0] == DOUBLE and len(plan.candidates) == 4
    assert plan.runner_up == CPU
    assert plan.margin_fraction == pytest.approx(1100 / 900 - 1)
    assert any("one iteration old" in line for line in plan.changes_learning)
    assert "double-buffer 1,100" in plan.reasons[0] and "cpu 900" in plan.reasons[0]
    assert "It was raced because the prediction is a tie" in explain_plan(plan)
    assert Plan.from_json(plan.to_json()).raced == plan.raced


def test_the_best_of_every_scheme_stays_first_where_another_of_the_same_scheme_wins(
    tie: Plan,
) -> None:
    smaller = dataclasses.replace(
        CPU, placement=dataclasses.replace(CPU.placement, minibatch_rows=8)
    )
    plan = dataclasses.replace(
        tie, candidates=(CPU, DOUBLE, GPU, HYBRID, smaller), rivals=(CPU, smaller)
    )
    won = decide(plan, verdict((CPU, 1000.0), (smaller, 1100.0)))
    assert won.chosen == smaller
    assert list(won.best_of_schemes) == ["cpu", "double-buffer", "gpu", "hybrid"]
    assert sorted(map(id, won.candidates)) == sorted(map(id, plan.candidates))
    assert "cpu (minibatch 8) is predicted to run 1,000" in won.reasons[1]


def test_a_lead_within_the_noise_leaves_the_choice_as_it_is(tie: Plan) -> None:
    plan = decide(tie, verdict((CPU, 1000.0), (DOUBLE, 1015.0), (GPU, 500.0), noise=0.02))
    assert plan.chosen == CPU
    assert plan.reasons[0] == tie.reasons[0] and plan.raced in plan.reasons


def test_minibatches_count_for_what_they_are_worth(tie: Plan) -> None:
    large = dataclasses.replace(DOUBLE, sample_efficiency=0.5)
    plan = dataclasses.replace(tie, candidates=(CPU, large), runner_up=large, rivals=(CPU, large))
    assert decide(plan, verdict((CPU, 1000.0), (large, 1500.0))).chosen == CPU


def test_of_those_as_fast_the_smaller_minibatch_is_taken(tie: Plan) -> None:
    larger = dataclasses.replace(
        CPU,
        placement=dataclasses.replace(
            CPU.placement, minibatch_rows=2 * CPU.placement.minibatch_rows
        ),
    )
    for first, second, rate, chosen in (
        (CPU, larger, 1025.0, CPU),  # 2.5 % are not worth it, however well they are known
        (CPU, larger, 1050.0, larger),
        (larger, CPU, 980.0, CPU),  # 2 % behind
        (larger, CPU, 940.0, larger),
    ):
        plan = dataclasses.replace(
            tie, chosen=first, candidates=(first, second), rivals=(first, second)
        )
        said = verdict((first, 1000.0), (second, rate), noise=0.001)
        assert decide(plan, said).chosen is chosen, rate


def test_what_a_race_said_is_kept_for_the_same_workload_machine_and_rivals(
    tie: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPLACE_HOME", str(tmp_path))
    said = verdict((CPU, 900.0), (DOUBLE, 1100.0), (GPU, 500.0))
    assert kept_verdict(tie, MACHINE) is None
    keep_verdict(tie, MACHINE, said)
    assert kept_verdict(tie, MACHINE) == said
    assert kept_verdict(dataclasses.replace(tie, fingerprint="other"), MACHINE) is None
    wider = dataclasses.replace(tie, workload=tie.workload.replace(hidden_sizes=(16,)))
    assert kept_verdict(wider, MACHINE) is None
    keep_verdict(wider, MACHINE, said)
    assert kept_verdict(tie, MACHINE) == said
    # A rival that has not been raced yet asks for a new race.
    moved = dataclasses.replace(
        DOUBLE, placement=dataclasses.replace(DOUBLE.placement, learn_threads=7)
    )
    assert kept_verdict(dataclasses.replace(tie, rivals=(CPU, moved)), MACHINE) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": 99, "races": {}}'])
def test_a_damaged_file_of_races_counts_as_none(
    tie: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setenv("AUTOPLACE_HOME", str(tmp_path))
    path = store.calibration_path(MACHINE).with_suffix(".races.json")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert kept_verdict(tie, MACHINE) is None
    keep_verdict(tie, MACHINE, verdict((CPU, 1.0), (DOUBLE, 1.0), (GPU, 1.0)))
    assert kept_verdict(tie, MACHINE) is not None


def test_the_race_itself_is_that_of_the_rivals(tie: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(plan: Plan, entrants: list[tuple[str, Candidate]], **options: object) -> RaceResult:
        assert options["seconds"] == close_calls.SECONDS
        return RaceResult(
            entrants=tuple(
                Raced(candidate=c, name=name, rows=1000, turns_s=(1.0 + i,) * 4)
                for i, (name, c) in enumerate(entrants)
            )
        )

    monkeypatch.setattr("autoplace.race.race", pretend)
    said = close_calls.run_race(tie)
    assert said.rates == verdict((CPU, 1000.0), (DOUBLE, 500.0), (GPU, 1000 / 3)).rates
    assert said.noise_fraction == 0.0
