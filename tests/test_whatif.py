"""Planning for a machine that is not here: where its environment step times come from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autoplace import store
from autoplace.cli import main
from autoplace.cost_model import UNTIMED_ERROR, Z90, fit_cost_model
from autoplace.errors import CalibrationError, UsageError
from autoplace.machine import detect_machine
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.whatif import given_steps, scaled_steps, speed_ratio, with_steps
from autoplace.workload import EnvSpec
from tests.synthetic import Truth, env_measurements, make_calibration

ENV = EnvSpec.make("CartPole-v1")
SLOWER = Truth(cpu_op_s=7.5e-6)  # 2.5 times as long as the default's 3 microseconds


def step(number: int, workers: int = 0, backend: str = "") -> Task:
    backend = backend or ("process" if workers else "sync")
    return Task(op="env_step", env=ENV, backend=backend, num_envs=number, workers=workers)


def seconds(measurements: list[Measurement]) -> dict[Task, float]:
    return {m.task: m.median_s for m in measurements}


def here(*steps: tuple[Task, float]) -> Calibration:
    """This machine, whose 2 CPUs issue an operation in 3 microseconds."""
    timed = [Measurement(task=task, times_s=(time_s,) * 5) for task, time_s in steps]
    return make_calibration(Truth(), quick=True).with_measurements(timed)


def test_step_times_grow_as_a_single_thread_slows_down() -> None:
    there = make_calibration(SLOWER, quick=True)
    assert speed_ratio(here(), there) == pytest.approx(2.5)
    found = scaled_steps(ENV, here((step(1), 2e-5), (step(8), 1.2e-4)), there, 8)
    assert seconds(found) == pytest.approx({step(1): 5e-5, step(8): 3e-4})
    assert {m.origin for m in found} == {"scaled"}


def test_more_workers_than_were_timed_follow_from_their_exchange() -> None:
    # 1 ms a step, 200 us for an exchange with one worker, 100 us for a hand-off, half of which
    # each further worker takes. Hand-offs take as long there as here.
    timed = here(
        (step(1), 1e-3), (step(8), 8e-3), (step(1, 1), 1.2e-3), (step(8, 1), 8.2e-3),
        (step(8, 2), 4.2e-3),
    )  # fmt: skip
    there = make_calibration(SLOWER, usable_cpus=8, quick=True)
    found = seconds(scaled_steps(ENV, timed, there, 8))
    assert found[step(8, 2)] == pytest.approx(2.5 * 4.2e-3)
    assert found[step(8, 4)] == pytest.approx(2.5 * 2.2e-3 + 3 * 5e-5)
    assert found[step(8, 8)] == pytest.approx(2.5 * 1.2e-3 + 7 * 5e-5)


def test_a_machine_with_fewer_cpus_gets_no_more_workers_than_that() -> None:
    timed = here((step(8), 8e-3), (step(8, 1), 8.2e-3), (step(8, 2), 4.2e-3))
    there = make_calibration(Truth(), usable_cpus=1, quick=True)
    assert {task.workers for task in seconds(scaled_steps(ENV, timed, there, 8))} == {0, 1}


def test_where_workers_were_not_worth_timing_none_are_made_up() -> None:
    there = make_calibration(Truth(), usable_cpus=8, quick=True)
    found = scaled_steps(ENV, here((step(1), 5e-6), (step(8), 4e-5)), there, 8)
    assert {task.workers for task in seconds(found)} == {0}


def test_a_given_step_time_takes_the_place_of_a_measured_one() -> None:
    measured = here((step(1), 2e-5), (step(8, backend="vector"), 1e-5))
    calibration = with_steps(measured, ENV, given_steps(ENV, 1e-3, measured, 8))
    found = {m.task: m for m in calibration.measurements if m.task.op == "env_step"}
    assert step(8, backend="vector") not in found
    assert found[step(8)].median_s == pytest.approx(8e-3)
    # Two workers take four steps each; the exchange takes four hand-offs of 100 us and a half.
    assert found[step(8, 2)].median_s == pytest.approx(4e-3 + 4.5e-4)
    cost = fit_cost_model(calibration).predict([step(8)])[step(8)]
    assert (cost.seconds, cost.source) == (pytest.approx(8e-3), "given")
    assert cost.high_s < 1.1 * cost.seconds  # as certain as a step within a run can be


@pytest.mark.parametrize("time_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_given_step_time_is_a_time(time_s: float) -> None:
    with pytest.raises(UsageError, match="--env-step-time is in seconds and above 0, got"):
        given_steps(ENV, time_s, here(), 8)


def test_a_scaled_step_time_is_uncertain_and_says_so() -> None:
    there = make_calibration(SLOWER, quick=True)
    found = scaled_steps(ENV, here((step(1), 2e-5), (step(8), 1.6e-4)), there, 8)
    model = fit_cost_model(there.with_measurements(found))
    for cost in model.predict([step(8), step(4)]).values():
        assert cost.source == "extrapolated"
        assert cost.standard_error_s / cost.seconds >= UNTIMED_ERROR


def test_every_cost_of_a_modelled_machine_is_uncertain_and_says_so() -> None:
    measured = here((step(1), 2e-5))
    modelled = dataclasses.replace(measured, origin="modelled")
    task = next(m.task for m in measured.measurements if m.task.op == "update")
    between = dataclasses.replace(task, rows=task.rows + 1)
    costs = fit_cost_model(modelled).predict([task, between])
    known = fit_cost_model(measured).predict([task, between])
    for one in (task, between):
        assert costs[one].source == "modelled"
        assert costs[one].seconds == pytest.approx(known[one].seconds)
        assert costs[one].high_s >= costs[one].seconds * 1.35**Z90 > known[one].high_s


def test_a_measurement_keeps_its_origin_in_json() -> None:
    for origin in ("measured", "scaled", "given"):
        kept = Measurement(task=step(1), times_s=(1e-3,), origin=origin)
        assert Measurement.from_json(kept.to_json()) == kept


# --------------------------------------------------------------------------------------------------
# The store and the command line


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with a calibration of this machine, CartPole's step time included."""
    monkeypatch.setenv("AUTOPLACE_HOME", str(tmp_path / "home"))
    machine = detect_machine()
    calibration = dataclasses.replace(
        make_calibration(Truth(), usable_cpus=machine.usable_cpus, quick=True), machine=machine
    )
    store.save_calibration(calibration.with_measurements(env_measurements(ENV, 2e-5)))
    return tmp_path


@pytest.fixture
def there(home: Path) -> Path:
    """The file of a modelled machine with a GPU, whose thread is 2.5 times as slow."""
    calibration = make_calibration(dataclasses.replace(SLOWER, gpu=True), quick=True)
    path = home / "there.json"
    figures = ("12 TFLOP/s: a page", "9 us: another")
    store.save_calibration(
        dataclasses.replace(calibration, origin="modelled", sources=figures), path
    )
    return path


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", "CartPole-v1", *map(str, arguments)])


def env_step_of(result: Result) -> dict:
    assert result.exit_code == 0, result.output
    return next(s for s in json.loads(result.stdout)["stages"] if s["name"] == "env_step")


def test_plan_for_another_machine_scales_what_was_measured_here(home: Path, there: Path) -> None:
    result = plan("--calibration", there, "--scheme", "gpu")
    assert result.exit_code == 0, result.output
    assert f"{there} has no step time of CartPole-v1: this machine's x 2.5" in result.stderr
    assert "modelled from 2 published figures, nothing was timed on Known CPU + Known GPU" in (
        result.stderr
    )
    assert "scheme gpu (a modelled machine)" in result.stdout
    stage = env_step_of(plan("--calibration", there, "--scheme", "gpu", "--json"))
    # 128 vector steps of 8 environments: 2.5 x (5 + 8 x 20) us each.
    assert stage["total_s"] == pytest.approx(128 * 2.5 * 165e-6)
    assert stage["source"] == "extrapolated"
    stored = store.stored_calibration(detect_machine(accelerators=False))[0]
    assert stored is not None
    assert all(m.origin == "measured" for m in stored.measurements)


def test_plan_takes_the_other_machines_own_step_time_if_it_has_one(home: Path, there: Path) -> None:
    own = store.read_calibration(there).with_measurements(env_measurements(ENV, 7e-5))
    store.save_calibration(own, there)
    result = plan("--calibration", there, "--scheme", "cpu", "--json")
    assert env_step_of(result)["total_s"] == pytest.approx(128 * 565e-6)
    assert env_step_of(result)["source"] == "modelled"
    assert "has no step time" not in result.stderr


@pytest.mark.parametrize("elsewhere", [False, True])
def test_plan_takes_a_given_step_time(home: Path, there: Path, elsewhere: bool) -> None:
    file = ("--calibration", there) if elsewhere else ()
    arguments = (*file, "--scheme", "cpu", "--env-step-time", "1e-3", "--env-backend", "sync")
    result = plan(*arguments, "--json")
    stage = env_step_of(result)
    assert stage["total_s"] == pytest.approx(128 * 8e-3)
    assert stage["source"] == "given"
    assert "a step of CartPole-v1 takes 1.00 ms, as given" in result.stderr


def test_a_step_time_of_nothing_is_refused_in_one_line(home: Path) -> None:
    result = plan("--env-step-time", "0")
    assert result.exit_code == 2
    assert "--env-step-time is in seconds and above 0, got 0: change it" in result.stderr


def test_a_modelled_calibration_is_never_taken_for_this_machines_own(home: Path) -> None:
    machine = detect_machine(accelerators=False)
    stored, _ = store.stored_calibration(machine)
    assert stored is not None
    modelled = dataclasses.replace(stored, origin="modelled")
    with pytest.raises(CalibrationError, match="is not kept as a machine's own"):
        store.save_calibration(modelled)
    store.save_calibration(modelled, store.calibration_path(machine))
    found, reason = store.stored_calibration(machine)
    assert found is None
    assert reason is not None and "is modelled, not measured: run autoplace calibrate" in reason
    shown = CliRunner().invoke(main, ["machine"])
    assert "is modelled, not measured" in shown.stdout
    merged = store.merge_calibration(machine, env_measurements(ENV, 2e-5))
    assert (merged.origin, len(merged.measurements)) == ("measured", 3)
