"""What busy cores cost, from ratios that are known."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from autoplace.contention import Contention
from autoplace.cost_model import fit_cost_model
from autoplace.measure.grid import calibration_tasks
from autoplace.measure.probes import timed_tasks
from autoplace.measurement import Measurement, Task
from tests.synthetic import Truth, make_calibration


def test_ratios_are_those_that_were_timed_and_interpolated_between() -> None:
    # 1 + 0.1 per core: 1.1 beside one, 1.7 beside seven
    contention = Contention(make_calibration(Truth(contention=0.1), usable_cpus=8))
    for stage in ("env_step", "policy_step", "update", "gae"):
        assert contention.factor(stage, 1, 0) == 1.0
        assert contention.factor(stage, 1, 1) == pytest.approx(1.1)
        assert contention.factor(stage, 1, 7) == pytest.approx(1.7)
    # halfway in cores is halfway in logarithms
    assert contention.factor("env_step", 1, 4) == pytest.approx(math.sqrt(1.1 * 1.7))
    assert contention.factor("env_step", 1, 20) == pytest.approx(1.7)


def test_a_message_is_slowed_only_where_no_core_is_left_to_wake_up_on() -> None:
    contention = Contention(make_calibration(Truth(contention=0.5), usable_cpus=8))
    assert [contention.factor("handoff", 1, busy) for busy in (0, 1, 7)] == [1.0, 1.0, 1.0]
    assert contention.factor("handoff", 1, 8) == pytest.approx(5.0)  # 1 + 0.5 per core
    assert contention.factor("handoff", 1, 30) == pytest.approx(5.0)


def test_threads_have_ratios_of_their_own() -> None:
    contention = Contention(make_calibration(Truth(contention=0.1), usable_cpus=8))
    # four threads were timed beside the other four cores
    assert contention.factor("update", 4, 4) == pytest.approx(1.4)
    assert contention.factor("update", 5, 4) == pytest.approx(1.4)
    assert contention.factor("update", 1, 4) != pytest.approx(1.4)


def test_what_was_never_timed_is_not_slowed() -> None:
    quiet = Contention(make_calibration(Truth(), usable_cpus=1))
    assert quiet.factor("update", 1, 3) == 1.0
    loud = Contention(make_calibration(Truth(contention=0.5)))
    assert loud.factor("handoff", 1, 1) == 1.0


def test_noise_does_not_make_busy_cores_a_gain() -> None:
    calibration = make_calibration(Truth(contention=-0.05))
    assert Contention(calibration).factor("update", 1, 1) == 1.0


def test_steps_beside_others_have_no_share_in_the_cost_model() -> None:
    loud, quiet = (fit_cost_model(make_calibration(Truth(contention=c))) for c in (3.0, 0.0))
    tasks = [t for t in calibration_tasks(("cpu",), 2) if t.network is not None and not t.beside]
    assert loud.predict(tasks) == quiet.predict(tasks)


def crowded(*timed: tuple[int, int, float]) -> Contention:
    """From (stretches, processes, seconds until the last is through)."""
    quiet = make_calibration(Truth(), usable_cpus=2)
    kept = [m for m in quiet.measurements if m.task.op != "crowd"]
    more = [
        Measurement(task=Task(op="crowd", shape=(n,), workers=workers), times_s=(seconds,))
        for n, workers, seconds in timed
    ]
    return Contention(dataclasses.replace(quiet, measurements=(*kept, *more)))


def test_how_unevenly_cores_are_shared_is_what_was_timed() -> None:
    # Three on two cores: 2 x as long where they stay, 1.5 x where they are shared out at once.
    short, long = ((100, 2, 0.01), (100, 3, 0.02)), ((1000, 2, 0.1), (1000, 3, 0.16))
    found = crowded(*short, *long).unevenness(np.array([0.001, 0.01, 0.1, 0.2, 1.0]))
    assert found == pytest.approx([1.0, 1.0, 0.2, 0.1, 0.02])
    between = crowded(*short, *long).unevenness(np.array([math.sqrt(0.01 * 0.1)]))
    assert between == pytest.approx([0.6])
    # Noise makes it neither less than none nor more than all.
    noisy = crowded((100, 2, 0.01), (100, 3, 0.021), (1000, 2, 0.1), (1000, 3, 0.14))
    assert noisy.unevenness(np.array([0.01, 0.1])) == pytest.approx([1.0, 0.0])
    assert crowded().unevenness(np.array([0.1])) == pytest.approx([0.0])


def test_a_calibration_times_as_many_processes_as_cores_and_one_more() -> None:
    for quick, longest in ((False, 1 << 14), (True, 1 << 11)):
        (task,) = (t for t in calibration_tasks(("cpu",), 4, quick=quick) if t.op == "crowd")
        timed = timed_tasks(task)
        assert max(t.shape[0] for t in timed) == longest
        assert {t.workers for t in timed} == {4, 5}
    assert not [t for t in calibration_tasks(("cpu",), 1) if t.op == "crowd"]


def test_a_calibration_times_steps_beside_one_and_beside_every_other_core() -> None:
    def beside(cpus: int, **options: bool) -> set[tuple[str, int, int]]:
        tasks = calibration_tasks(("cpu",), cpus, **options)
        crowding = {t.op for t in tasks if t.beside and t.threads + t.beside > cpus}
        assert crowding <= {"hand_over"}  # all others have a core to themselves
        alone = {dataclasses.replace(t, beside=0) for t in tasks if t.beside}
        assert alone <= set(tasks)
        return {(t.op, t.threads, t.beside) for t in tasks if t.beside}

    steps = ("interpreter", "policy_step", "update")
    assert beside(1) == set()
    message = {("hand_over", 1, 2)}
    assert beside(2) == beside(2, quick=True) == {(op, 1, 1) for op in steps} | message
    assert beside(8) == {(op, 1, n) for op in steps for n in (1, 7)} | {
        ("hand_over", 1, 8),
        ("update", 2, 6),
        ("update", 4, 4),
    }


def test_a_task_beside_others_survives_json() -> None:
    task = Task(op="interpreter", beside=3)
    measurement = Measurement(task=task, times_s=(1.0,))
    assert Measurement.from_json(measurement.to_json()) == measurement
    assert "beside" not in Task(op="interpreter").to_json()


def test_two_processes_that_share_a_core_by_chance_hide_no_unevenness() -> None:
    # The short pair took 0.017 s where both cores would have done with 0.01.
    short, long = ((100, 2, 0.017), (100, 3, 0.019)), ((1000, 2, 0.1), (1000, 3, 0.16))
    found = crowded(*short, *long).unevenness(np.array([0.01, 0.1]))
    assert found == pytest.approx([0.8, 0.2])
