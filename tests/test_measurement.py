"""Statistics by hand, and the way to JSON and back."""

from __future__ import annotations

import dataclasses
import json

import pytest

from autoplace.measurement import Calibration, Episodes, Measurement, Task
from autoplace.workload import EnvSpec, NetworkSpec
from tests.synthetic import Truth, make_calibration

NETWORK = NetworkSpec(observation_size=4, hidden_sizes=(64, 64), action_size=2)


def test_median_and_spread_are_those_worked_out_by_hand() -> None:
    m = Measurement(task=Task(op="dispatch"), times_s=(1.0, 2.0, 3.0, 4.0, 100.0))
    # Around 3 the deviations are 2, 1, 0, 1, 97: their median is 1, 1.4826 x 1 / 3 the spread.
    # 100 is beyond 5 x 1.4826, and the median of the others counts.
    assert m.median_s == 2.5
    assert m.spread_fraction == pytest.approx(0.4942)
    # 1.2533 x 0.4942 / sqrt(5) x 5 / 4.2
    assert m.error_fraction == pytest.approx(0.32975, rel=1e-4)
    assert m.outlier_fraction == pytest.approx(0.2)


def test_a_wild_outlier_does_not_move_the_median() -> None:
    calm = Measurement(task=Task(op="dispatch"), times_s=(1.0,) * 20)
    wild = Measurement(task=Task(op="dispatch"), times_s=(1.0,) * 19 + (1000.0,))
    assert calm.median_s == wild.median_s


def test_every_visit_counts_for_one_however_many_samples_it_took() -> None:
    m = Measurement(task=Task(op="dispatch"), times_s=(1.0,) * 10 + (1.2,) * 3, visits=(10, 3))
    assert m.visit_medians_s == (1.0, 1.2)
    assert m.median_s == pytest.approx(1.1)


def test_a_visit_that_met_other_programs_is_left_out() -> None:
    m = Measurement(task=Task(op="dispatch"), times_s=(9.0,) * 10 + (1.0,) * 3, visits=(10, 3))
    assert m.visit_medians_s == (9.0, 1.0)
    assert m.median_s == 1.0
    back = Measurement.from_json(json.loads(json.dumps(m.to_json())))
    assert back == m


def test_episodes_in_a_run_are_between_random_ones_and_the_limit() -> None:
    episodes = Episodes(end_s=1e-5, steps=10.0, timed_ends=0.1, limit=100)
    # The mean of 1 / length, ln length uniform from ln 10 to ln 100: (0.1 - 0.01) / ln 10.
    assert episodes.expected_steps == pytest.approx(1 / 0.0390865)
    for limit in (None, 10, 7):  # nothing says that they could last longer
        same = dataclasses.replace(episodes, limit=limit)
        assert same.expected_steps == pytest.approx(10)
    # Every episode has one row more that only resets, and so lasts 25.58 of 26.58.
    m = Measurement(
        task=Task(op="env_step"), times_s=(1.0,), valid_fraction=10 / 11, episodes=episodes
    )
    assert m.expected_valid_fraction == pytest.approx(25.5843 / 26.5843)
    assert dataclasses.replace(m, episodes=None).expected_valid_fraction == 10 / 11
    assert Measurement.from_json(json.loads(json.dumps(m.to_json()))) == m


def test_drift_compares_the_second_half_with_the_first() -> None:
    m = Measurement(task=Task(op="dispatch"), times_s=(1.0, 1.0, 2.0, 2.0))
    assert m.drift_fraction == pytest.approx(1 / 1.5)
    assert Measurement(task=Task(op="dispatch"), times_s=(1.0, 2.0)).drift_fraction == 0


@pytest.mark.parametrize(
    "task",
    [
        Task(op="matmul", threads=2, shape=(8, 64, 64), residency="copied", device="cuda:0"),
        Task(op="copy", device="cuda:1", direction="h2d", pinned=True, shape=(256,)),
        Task(op="update", network=NETWORK, rows=64, engine="eager"),
        Task(op="env_step", env=EnvSpec.make("A-v1", {"x": 1}), backend="sync", num_envs=8),
    ],
    ids=lambda task: task.op,
)
def test_a_task_survives_json_and_still_hashes_alike(task: Task) -> None:
    back = Task.from_json(json.loads(json.dumps(task.to_json())))
    assert back == task
    assert hash(back) == hash(task)


def test_json_leaves_defaults_out() -> None:
    assert Task(op="dispatch").to_json() == {"op": "dispatch"}


def test_a_calibration_survives_json() -> None:
    calibration = make_calibration(Truth(gpu=True), env=EnvSpec.make("Known-v0"), quick=True)
    text = json.dumps(calibration.to_json())
    back = Calibration.from_json(json.loads(text))
    assert back.machine == calibration.machine
    assert [m.task for m in back.measurements] == [m.task for m in calibration.measurements]
    first, second = back.measurements[0], calibration.measurements[0]
    assert first.times_s == pytest.approx(second.times_s, rel=1e-8)


def test_a_newer_measurement_replaces_the_older_of_the_same_task() -> None:
    old = Measurement(task=Task(op="dispatch"), times_s=(1.0,))
    new = Measurement(task=Task(op="dispatch"), times_s=(2.0,))
    other = Measurement(task=Task(op="launch"), times_s=(3.0,))
    calibration = make_calibration(Truth(), quick=True)
    merged = calibration.with_measurements([old]).with_measurements([new, other])
    assert merged.by_task[Task(op="dispatch")].median_s == 2.0
    assert merged.by_task[Task(op="launch")].median_s == 3.0
    assert len(merged.measurements) == len(calibration.measurements)
