"""The explanation as text: everything it says is in the plan."""

from __future__ import annotations

import dataclasses
import json

import pytest

from autoplace.measurement import Episodes
from autoplace.planner.explain import describe_network, describe_placement, explain_plan
from autoplace.planner.plan import Plan
from autoplace.planner.search import make_plan
from autoplace.units import format_percent, format_rate, format_seconds
from autoplace.workload import ImageSpec, NetworkSpec
from tests.planner.test_search import ENV, workload
from tests.synthetic import Truth, make_calibration


@pytest.fixture(scope="module")
def plan():
    calibration = make_calibration(Truth(gpu=True), env=ENV)
    return make_plan(calibration, workload(hidden_sizes=(64, 64), minibatch_rows=64))


def test_it_names_scheme_speed_bottleneck_runner_up_and_margin(plan) -> None:
    text = plan.explain()
    assert f"scheme {plan.scheme}" in text
    assert format_rate(plan.chosen.env_steps_per_s) in text
    assert f"Bottleneck: {plan.bottleneck}" in text
    runner_up = format_rate(plan.runner_up.env_steps_per_s)
    assert f"Runner-up: scheme {plan.runner_up.scheme}, {runner_up}" in text
    assert format_percent(plan.margin_fraction) in text


def test_every_stage_is_a_line_with_its_time_and_source(plan) -> None:
    lines = plan.explain().splitlines()
    for stage in plan.chosen.stages:
        matching = [line for line in lines if f" {stage.name} " in line and stage.source in line]
        assert any(format_seconds(stage.total_s) in line for line in matching), stage


def test_it_says_how_long_episodes_are_taken_to_be() -> None:
    calibration = make_calibration(Truth(), env=ENV)
    assert "Assumed" not in make_plan(calibration, workload()).explain()
    measurements = tuple(
        dataclasses.replace(
            m, episodes=Episodes(end_s=2e-5, steps=10.0, timed_ends=0.1, limit=1000)
        )
        if m.task.op == "env_step"
        else m
        for m in calibration.measurements
    )
    longer = make_plan(dataclasses.replace(calibration, measurements=measurements), workload())
    (line,) = longer.assumes
    assert line == (
        "episodes of 47 env steps, between the 10 under random actions and the limit of 1,000; "
        "the end of one takes 20.0 µs"
    )
    assert "Assumed: episodes of 47 env steps" in longer.explain()
    assert Plan.from_json(json.loads(json.dumps(longer.to_json()))).assumes == longer.assumes


def test_flips_say_what_pays_from_where(plan) -> None:
    text = plan.explain()
    assert plan.flips
    for flip in plan.flips:
        where = "" if flip.device_from == flip.device_to else f" on {flip.device_to}"
        assert f"{flip.scheme_to}{where} pays from" in text


def test_a_tie_is_called_a_tie(plan) -> None:
    import dataclasses

    tie = dataclasses.replace(plan, is_close=True)
    assert "a tie" in explain_plan(tie)
    assert "a tie" not in explain_plan(dataclasses.replace(plan, is_close=False))


def test_what_changes_learning_is_listed(plan) -> None:
    import dataclasses

    changed = dataclasses.replace(plan, changes_learning=("num_envs 16 instead of 8",))
    assert "num_envs 16 instead of 8" in explain_plan(changed)


def test_all_candidates_are_shown_when_asked_for(plan) -> None:
    short, full = explain_plan(plan), explain_plan(plan, every_candidate=True)
    assert "--all shows them" in short
    assert "--all shows them" not in full
    assert full.count("\n") > short.count("\n")


def test_the_text_fits_a_terminal(plan) -> None:
    for line in explain_plan(plan).splitlines():
        assert len(line) <= 120, line


def test_a_placement_says_where_each_side_runs(plan) -> None:
    by_scheme = {}
    for candidate in plan.candidates:
        by_scheme.setdefault(candidate.scheme, candidate.placement)
    assert "learning on cuda:0, chunks of" in describe_placement(by_scheme["hybrid"])
    assert "sampling on cuda:0" in describe_placement(by_scheme["gpu"])
    assert "CPU thread" in describe_placement(by_scheme["cpu"])


def test_a_network_is_told_in_a_few_words() -> None:
    plain = NetworkSpec(observation_size=4, hidden_sizes=(64, 32), action_size=2)
    assert describe_network(plain) == "hidden 64,32"
    image = ImageSpec(key="", height=10, width=10, channels=1)
    small = NetworkSpec(observation_size=100, hidden_sizes=(), action_size=2, images=(image,))
    assert describe_network(small) == "small CNN shared, hidden none"
    own = dataclasses.replace(plain, factory="net.py:make", factory_parameters=1234)
    assert describe_network(own) == "network net.py:make (1,234 parameters)"
