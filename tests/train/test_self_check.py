"""When a stage counts as off its prediction, and what is made of the evidence."""

import dataclasses
from types import SimpleNamespace

import pytest

from autoplace.engines import Verdict
from autoplace.planner.plan import Stage
from autoplace.train import self_check
from autoplace.train.self_check import SelfCheck
from autoplace.train.witness import Evidence
from tests.train.plans import make_plan


@pytest.fixture(autouse=True)
def short_windows(monkeypatch):
    monkeypatch.setattr(self_check, "FIRST_WINDOW_S", 0.0)


PREDICTED = {
    ("policy_step", "sampler"): 0.010,
    ("env_step", "sampler"): 0.020,
    ("update", "learner"): 0.068,
    ("handoff", "sampler"): 0.002,
}


def planned(scheme="cpu", width=1.1):
    """A plan of 100 ms an iteration, each prediction within 10 % either way."""
    plan = make_plan(scheme=scheme)
    stages = tuple(
        Stage(
            name=name,
            lane=lane,
            start_s=0.0,
            calls=1,
            total_s=seconds,
            low_s=seconds / width,
            high_s=seconds * width,
            source="measured",
        )
        for (name, lane), seconds in PREDICTED.items()
    )
    chosen = dataclasses.replace(plan.chosen, stages=stages, iteration_s=0.1)
    return dataclasses.replace(plan, chosen=chosen)


class Told:
    """A witness that says what it is told to."""

    def __init__(self, **seen):
        self.seen = seen

    def begin(self):
        pass

    def read(self):
        return Evidence(**{"slowdown": {}, **self.seen})


def checked(*windows, plan=None, lengths=(100.0,), switched=False, engines=(), **seen):
    """A check after windows of given factors by stage name, each of 10 iterations."""
    check = SelfCheck(Told(**seen))
    plan = plan or planned()
    check.on_start(SimpleNamespace(plan=plan))
    if switched:
        check.on_switch(plan)
    for number, factors in enumerate(({}, *windows) if len(windows) > 1 else windows):
        check._skip = self_check.WARM_UP_ITERATIONS if not number else 0
        if number:
            check.next_window()
        for iteration in range(10 + (0 if number else self_check.WARM_UP_ITERATIONS)):
            stages = {
                key: seconds * (f(iteration) if callable(f := factors.get(key[0], 1.0)) else f)
                for key, seconds in PREDICTED.items()
            }
            length = lengths[min(number, len(lengths) - 1)]
            check.on_iteration(
                SimpleNamespace(
                    stage_s=stages,
                    iteration_s=0.1,
                    mean_length=length,
                    iteration=iteration,
                    engines=engines,
                )
            )
        assert check.is_due
    return check


def found(*windows, **options):
    check = checked(*windows, **options)
    assert check.is_off()
    return [(d.name, d.kind) for d in check.judge().deviations]


def test_within_its_interval_a_stage_is_not_off():
    assert not checked({"update": 1.09, "env_step": 0.92}).is_off()


def test_a_difference_that_does_not_matter_to_the_iteration_is_not_off():
    assert not checked({"handoff": 2.0, "policy_step": 1.2}).is_off()


def test_noise_widens_the_interval():
    assert checked({"update": 1.15}).is_off()
    assert not checked({"update": lambda i: 1.15 + 0.35 * (-1) ** i}).is_off()


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        ({"throttled_fraction": 0.2, "other_cpus": 1.0}, "quota"),
        ({"other_cpus": 1.0, "slowdown": {"cpu": 1.5}}, "load"),
        ({"slowdown": {"cpu": 1.5}}, "slower"),
        ({"slowdown": {"cpu": 1.02}}, "unknown"),
    ],
)
def test_the_first_evidence_that_fits_is_the_cause(seen, kind):
    slow = {"policy_step": 5.0, "env_step": 5.0, "update": 5.0}
    assert found(slow, **seen) == [
        ("policy_step", kind), ("env_step", kind), ("update", kind)
    ]  # fmt: skip


def test_sides_that_overlap_and_are_slow_on_a_quiet_machine_slow_each_other_down():
    slow = {"policy_step": 5.0, "env_step": 5.0, "update": 5.0}
    assert {kind for _, kind in found(slow, plan=planned("double-buffer"))} == {"contention"}


def test_a_dropped_engine_explains_the_step_that_it_was_for():
    slow = {"policy_step": 5.0, "update": 5.0}
    lost = Verdict(
        engine="compile",
        step="gradient step",
        dropped_because="no compiler",
        one_off_s=0.0,
        engine_s=0.0,
        eager_s=1e-3,
    )
    assert found(slow, engines=(lost,), slowdown={"cpu": 1.5}) == [
        ("policy_step", "slower"),
        ("update", "engine"),
    ]


def test_load_explains_nothing_that_is_faster():
    fast = {"env_step": 0.2, "update": 0.2, "policy_step": 0.2}
    assert ("update", "unknown") in found(fast, other_cpus=1.0)
    assert ("update", "faster") in found(fast, slowdown={"cpu": 0.5})
    assert ("update", "relief") in found(fast, switched=True)


def test_of_the_samplers_stages_only_the_environments_being_off_is_their_own():
    assert found({"env_step": 9.0}) == [("env_step", "environment")]
    check = checked({"env_step": 1.0}, {"env_step": 9.0}, lengths=(20.0, 20.0, 480.0))
    assert check.is_off()
    (line,) = check.judge().lines
    assert (
        "changed with the policy: 20.0 ms at first, with episodes of 20 steps, now of 480" in line
    )


def test_what_was_said_is_said_again_only_when_it_has_changed():
    slow = {"update": 3.0}
    check = checked(slow)
    assert check.is_off()
    check.judge()
    assert not check.is_off()
    for factor, is_news in ((3.5, False), (6.0, True), (1.0, True)):
        check.next_window()
        for iteration in range(40):
            stages = {**PREDICTED, ("update", "learner"): 0.068 * factor}
            check.on_iteration(
                SimpleNamespace(
                    stage_s=stages,
                    iteration_s=0.1,
                    mean_length=None,
                    iteration=iteration,
                    engines=(),
                )
            )
        assert check.is_due and check.is_off() == is_news
        if is_news:
            last = check.judge()
    assert last.lines == ("every stage takes what was predicted again",)
