"""Candidates in turns: what a race says, who runs in it, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import multiprocessing

import pytest
import torch

from autoplace.cost_model import fit_cost_model
from autoplace.errors import EnvError, UsageError
from autoplace.planner.plan import Candidate, Plan
from autoplace.planner.search import make_plan
from autoplace.race import (
    Raced,
    RaceResult,
    best_of_schemes,
    fixed_rules,
    race,
    without_repeats,
)
from autoplace.train.loop import Loop
from tests.envs.toys import Counter, register
from tests.synthetic import Truth, make_calibration
from tests.train.plans import make_plan as hand_made


def raced(name: str, *turns_s: float, efficiency: float = 1.0) -> Raced:
    candidate = dataclasses.replace(hand_made().chosen, sample_efficiency=efficiency)
    return Raced(candidate=candidate, name=name, rows=100, turns_s=turns_s)


def test_halves_hold_as_many_turns_of_either_direction() -> None:
    entrant = raced("a", 0.1, 0.2, 0.2, 0.1)
    assert entrant.halves == (1000.0, 500.0)
    assert entrant.iteration_s == pytest.approx(0.15)


def test_a_candidate_that_is_truly_slower_costs_what_it_loses() -> None:
    result = RaceResult(entrants=(raced("chosen", *[0.2] * 4), raced("other", *[0.1] * 4)))
    assert (result.chosen.name, result.best.name) == ("chosen", "other")
    assert result.regret_fraction == pytest.approx(0.5)
    assert result.noise_fraction == 0.0


def test_a_candidate_that_was_only_lucky_in_one_half_costs_nothing() -> None:
    # On the first half "other" is best, but loses on the second; on the second the choice is best.
    # Lost: 1 - 1000/800 = -0.25 and 0 by the choice itself.
    result = RaceResult(
        entrants=(raced("chosen", *[0.1] * 4), raced("other", 0.05, 0.125, 0.125, 0.05))
    )
    assert result.regret_fraction == 0.0
    assert result.noise_fraction == pytest.approx(0.458, abs=1e-3)  # half of ln(2.5)


def test_scores_count_what_a_minibatch_is_worth() -> None:
    result = RaceResult(
        entrants=(raced("fast", *[0.1] * 4, efficiency=0.4), raced("slow", *[0.2] * 4))
    )
    assert result.best.name == "slow"


@pytest.fixture(scope="module")
def plan_and_rules() -> tuple[Plan, list[tuple[str, Candidate]]]:
    workload = hand_made("CartPole-v1").workload
    calibration = make_calibration(Truth(), env=workload.env)
    model = fit_cost_model(calibration)
    plan = make_plan(calibration, workload, model=model)
    return plan, fixed_rules(plan, calibration, model, 2)


def test_the_best_of_every_scheme_runs_and_rules_that_differ_from_it(
    plan_and_rules: tuple[Plan, list[tuple[str, Candidate]]],
) -> None:
    plan, rules = plan_and_rules
    candidates = best_of_schemes(plan)
    assert candidates[0] == (plan.scheme, plan.chosen)
    assert {name for name, _ in candidates} >= {"cpu", "double-buffer"}
    assert [name for name, _ in best_of_schemes(plan, (plan.scheme,))] == [plan.scheme]
    for (_, rule), threads in zip(rules, (1, 2), strict=True):
        assert rule.scheme == "cpu"
        assert rule.placement.sample_threads == rule.placement.learn_threads == threads
        assert rule.placement.minibatch_rows == plan.placement.minibatch_rows
        assert rule.score <= plan.chosen.score * 1.03
    assert without_repeats([*candidates, *candidates]) == candidates


@pytest.mark.parametrize(
    ("name", "message"),
    [("magic", "there is no such scheme"), ("gpu", "no accelerator was calibrated")],
)
def test_a_scheme_that_cannot_run_is_refused_with_the_reason(
    plan_and_rules: tuple[Plan, list[tuple[str, Candidate]]], name: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        best_of_schemes(plan_and_rules[0], (name,))


def test_a_race_measures_the_stages_of_the_plan_and_leaves_nothing_running() -> None:
    plans = [hand_made(scheme="cpu"), hand_made(scheme="double-buffer")]
    shares: list[float] = []
    result = race(
        plans[0],
        [(plan.scheme, plan.chosen) for plan in plans],
        seconds=0.05,
        progress=shares.append,
    )
    assert multiprocessing.active_children() == []
    assert shares == sorted(shares) and shares[-1] == 1.0
    for entrant in result.entrants:
        assert len(entrant.turns_s) % 4 == 0 and entrant.turns_s
        assert {name for name, _ in entrant.stage_s} >= {"env_step", "update", "wait"}
        sampler_s = sum(s for (_, lane), s in entrant.stage_s.items() if lane == "sampler")
        # Turns of a few iterations on a machine that others use too: no more than an iteration.
        assert 0.0 < sampler_s < 1.5 * entrant.iteration_s
        assert entrant.rows == 32
    data = result.to_json()
    assert data["chosen"] == "cpu"
    assert data["best"] in ("cpu", "double-buffer")


def test_every_candidate_has_its_own_number_of_threads_in_its_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = hand_made(scheme="cpu")
    seen: dict[Loop, set[int]] = {}
    several = dataclasses.replace(plan.chosen.placement, sample_threads=2)
    iterate = Loop.iterate

    def spy(loop: Loop) -> None:
        seen.setdefault(loop, set()).add(torch.get_num_threads())
        iterate(loop)

    monkeypatch.setattr(Loop, "iterate", spy)
    before = torch.get_num_threads()
    # The one with two threads is opened last.
    candidates = [plan.chosen, dataclasses.replace(plan.chosen, placement=several)]
    race(plan, [("one", candidates[0]), ("two", candidates[1])], seconds=0.01)
    assert list(seen.values()) == [{1}, {2}]
    assert torch.get_num_threads() == before


def test_what_ends_a_run_ends_the_race() -> None:
    def explode() -> Counter:
        env = Counter(length=5)
        env.step = lambda action: 1 / 0  # type: ignore[method-assign]
        return env

    plan = hand_made(register("Explodes", explode))
    with pytest.raises((EnvError, ZeroDivisionError)):
        race(plan, [("cpu", plan.chosen)], seconds=0.1)
