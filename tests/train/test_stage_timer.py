import pytest

from autoplace.results import stage_seconds
from autoplace.train.stage_timer import StageTimer


def test_what_a_lane_does_not_spend_is_its_wait():
    timer = StageTimer()
    timer.add("env_step", "sampler", 2.0)
    timer.add("policy_step", "sampler", 1.0)
    timer.add("update", "learner", 4.0)
    assert timer.end_iteration(7.5) == {
        ("env_step", "sampler"): 2.0,
        ("policy_step", "sampler"): 1.0,
        ("update", "learner"): 4.0,
        ("wait", "sampler"): 4.5,
        ("wait", "learner"): 3.5,
    }


def test_the_result_is_the_median_without_the_first_iteration():
    timer = StageTimer()
    for seconds in (100.0, 1.0, 2.0, 9.0):
        timer.add("update", "learner", seconds)
        timer.end_iteration(seconds + 1)
    assert timer.stage_s()["update", "learner"] == 2.0
    assert timer.iteration_s() == 3.0


def test_a_single_iteration_counts_all_the_same_and_none_is_zero():
    timer = StageTimer()
    assert timer.iteration_s() == 0.0 and timer.stage_s() == {}
    timer.add("update", "learner", 5.0)
    timer.end_iteration(6.0)
    assert timer.stage_s()["update", "learner"] == pytest.approx(5.0)


def test_names_that_two_lanes_share_are_told_apart():
    stages = {("wait", "sampler"): 1.0, ("wait", "learner"): 2.0, ("gae", "learner"): 3.0}
    assert stage_seconds(stages) == {"wait@sampler": 1.0, "wait@learner": 2.0, "gae": 3.0}
