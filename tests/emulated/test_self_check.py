"""A run notices that it is not as planned, says why, and goes on under a better plan."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from autoplace.device import charge, torch_threads
from autoplace.errors import UsageError
from autoplace.measure.probes import build_probe
from autoplace.measure.timing import Series, run_probe
from autoplace.measurement import Measurement, Task
from autoplace.planner.observed import Observed, make_replanner
from autoplace.planner.plan import Plan, Stage
from autoplace.planner.search import make_plan as plan_for
from autoplace.train import Callback, IterationReport, self_check, train
from autoplace.train.checkpoint import load_checkpoint
from autoplace.train.self_check import Check
from autoplace.train.witness import Evidence, retime
from tests.emulated import EmulatedMachine, load_spec
from tests.emulated.recover import calibrate_machine, env_of, workload_of
from tests.emulated.spec import AcceleratorSpec, CpuSpec, MachineSpec
from tests.envs.toys import Counter, Stateless, register
from tests.train.plans import Listener, make_plan

CARTPOLE = "tests/emulated/env.py:make_cartpole"
ACCELERATOR = AcceleratorSpec(memory_bytes=64e6)
ROWS = 32
D = "emu:0"


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "FIRST_WINDOW_S", 0.0)


def machine(cores: int = 4) -> EmulatedMachine:
    return EmulatedMachine(MachineSpec(cpu=CpuSpec(cores=cores), accelerators=(ACCELERATOR,)))


def as_measured(plan: Plan, iterations: int = 13, *, cores: int = 4) -> Plan:
    """The plan with what it takes on the quiet machine as its prediction, 3 % either way."""
    with machine(cores):
        result = train(plan, total_steps=iterations * ROWS)
    stages = tuple(
        Stage(
            name=name,
            lane=lane,
            start_s=0.0,
            calls=1,
            total_s=seconds,
            low_s=seconds / 1.03,
            high_s=seconds * 1.03,
            source="measured",
        )
        for (name, lane), seconds in result.stage_s.items()
    )
    chosen = dataclasses.replace(plan.chosen, stages=stages, iteration_s=result.iteration_s)
    return dataclasses.replace(plan, chosen=chosen)


class EmulatedWitness:
    """Knows of other programs what the machine knows, and times a sentinel anew."""

    def __init__(self, running: EmulatedMachine) -> None:
        self._running = running
        task = Task(op="matmul", shape=(64, 64, 64))
        probe = build_probe(task)
        series = Series(tasks=probe.tasks)
        with torch_threads(task.threads):
            run_probe(probe, series, time_limit_s=0.01)
        self._sentinels: tuple[Measurement, ...] = tuple(series.measurements())

    def begin(self) -> None:
        pass

    def read(self) -> Evidence:
        return Evidence(
            other_cpus=self._running.clock.competing_load,
            usable_cpus=self._running.spec.cpu.cores,
            slowdown=retime(self._sentinels),
        )


class Checks(Listener):
    """Keeps what the checks found and what the run went on under."""

    def __init__(self) -> None:
        super().__init__()
        self.checks: list[Check] = []
        self.plans: list[Plan] = []

    def on_check(self, check: Check) -> None:
        self.checks.append(check)

    def on_switch(self, plan: Plan) -> None:
        self.plans.append(plan)


class At(Callback):
    """Does something after an iteration."""

    def __init__(self, iteration: int, action: Callable[[], None]) -> None:
        self._iteration, self._action = iteration, action

    def on_iteration(self, report: IterationReport) -> None:
        if report.iteration == self._iteration:
            self._action()


@contextlib.contextmanager
def running(cores: int = 4) -> Iterator[tuple[EmulatedMachine, dict[str, object], Checks]]:
    """A machine, what a run on it is to be given, and what it tells."""
    with machine(cores) as on:
        checks = Checks()
        yield on, {"witness": EmulatedWitness(on)}, checks


def kinds(check: Check) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for deviation in check.deviations:
        found.setdefault(deviation.kind, set()).add(deviation.name)
    return found


def test_a_run_that_goes_as_planned_says_nothing() -> None:
    plan = as_measured(make_plan(CARTPOLE))
    with running() as (_, options, checks):
        train(plan, total_steps=40 * ROWS, callbacks=[checks], **options)
    assert checks.checks == []


def test_competing_load_is_named_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    plan = as_measured(make_plan(CARTPOLE))
    with running() as (on, options, checks):

        def load(cpus: float) -> Callable[[], None]:
            return lambda: setattr(on.clock, "competing_load", cpus)

        acts = [checks, At(14, load(6.0)), At(33, load(0.0))]
        train(plan, total_steps=56 * ROWS, callbacks=acts, **options)
    first, *others = checks.checks
    assert 20 <= first.iteration <= 34
    assert kinds(first) == {"load": {"policy_step", "env_step", "gae", "update"}}
    assert all(d.ratio > 1.2 for d in first.deviations)
    assert "other programs took 6.0 of 4 CPUs meanwhile" in caplog.text
    assert others[-1].deviations == ()
    assert "every stage takes what was predicted again" in caplog.text


def test_a_slower_clock_is_told_from_load_by_a_task_that_is_timed_anew(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = as_measured(make_plan(CARTPOLE))
    with running() as (on, options, checks):

        def heat() -> None:  # everything takes half as long again from now on
            monkeypatch.setattr(on.clock, "_noise_factor", lambda lane: 1.5)

        train(plan, total_steps=40 * ROWS, callbacks=[checks, At(14, heat)], **options)
    assert set(kinds(checks.checks[0])) == {"slower"}
    assert "cpu itself takes 1.5 times as long for a calibrated task" in caplog.text


def test_an_environment_that_gets_slower_is_told_from_a_slower_machine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def grows(plain: object, total_steps: int) -> object:
        charge(seconds=5e-5 if total_steps < 16 * 14 else 2e-4)
        return plain

    env = register("Grows", lambda: Counter(observe=grows, length=8))
    plan = as_measured(make_plan(env), iterations=12)
    with running() as (_, options, checks):
        train(plan, total_steps=40 * ROWS, callbacks=[checks], **options)
    assert kinds(checks.checks[0]) == {"environment": {"env_step"}}
    assert "the environment itself has changed with the policy" in caplog.text


def test_sides_that_slow_each_other_down_are_told_from_a_slower_machine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = as_measured(make_plan(CARTPOLE, scheme="double-buffer"))  # each side has a core
    with running(cores=1) as (_, options, checks):
        train(plan, total_steps=30 * ROWS, callbacks=[checks], **options)
    assert "contention" in kinds(checks.checks[0])
    assert "sampling and learning slow each other down" in caplog.text


# --------------------------------------------------------------------------------------------------
# Going on under another plan


def test_the_run_goes_on_elsewhere_where_that_pays_and_learns_what_it_would_have(
    tmp_path: Path,
) -> None:
    env = register("StatelessMoved", Stateless)
    hyper = {"normalize_rewards": True, "hidden_sizes": (512, 512)}
    here = as_measured(make_plan(env, **hyper))
    there = as_measured(make_plan(env, scheme="hybrid", device=D, interval=16, **hyper))
    stayed = Checks()
    with machine():
        train(here, total_steps=60 * ROWS, callbacks=[stayed])

    asked: list[Observed] = []

    def replan(observed: Observed) -> Plan:
        asked.append(observed)
        return there

    with running() as (on, options, checks):
        load = At(14, lambda: setattr(on.clock, "competing_load", 20.0))
        result = train(
            here,
            total_steps=60 * ROWS,
            run_dir=tmp_path,
            callbacks=[checks, load],
            replan=replan,
            **options,
        )
        learned = checks.flat
    assert asked[0].is_machine_wide and not asked[0].is_contention
    assert checks.plans == [there]
    assert (result.switches, result.scheme, result.plan) == (1, "hybrid", there)
    assert (result.iterations, result.env_steps) == (60, 60 * ROWS)
    assert [r.env_steps for r in checks.reports] == [ROWS * k for k in range(1, 61)]
    torch.testing.assert_close(learned, stayed.flat, atol=1e-5, rtol=1e-5)
    assert load_checkpoint(tmp_path).optimizer["step"].item() == 60 * 4
    assert result.num_episodes == 60 * ROWS  # one a step
    assert sum(len(report.episodes) for report in checks.reports) == 60 * ROWS
    loaded = checks.reports[checks.checks[0].iteration - 1]
    assert loaded.iteration < 40
    assert checks.reports[-1].iteration_s < 0.5 * loaded.iteration_s  # though the load has not gone


def test_the_run_stays_where_the_change_would_not_pay() -> None:
    here = as_measured(make_plan(CARTPOLE))
    there = as_measured(make_plan(CARTPOLE, scheme="hybrid", device=D, interval=16))
    slow = dataclasses.replace(
        there, chosen=dataclasses.replace(there.chosen, iteration_s=here.chosen.iteration_s * 2)
    )
    with running() as (on, options, checks):
        load = At(14, lambda: setattr(on.clock, "competing_load", 6.0))
        result = train(
            here,
            total_steps=40 * ROWS,
            callbacks=[checks, load],
            replan=lambda observed: slow,
            **options,
        )
    assert checks.checks and result.switches == 0
    found = checks.checks[0]
    free = dataclasses.replace(there, chosen=dataclasses.replace(there.chosen, iteration_s=0.0))
    gain_s = found.iteration_s
    assert found.pays(free, iterations_left=10, switch_s=4 * gain_s)
    assert not found.pays(free, iterations_left=10, switch_s=6 * gain_s)  # saves less than twice
    same = dataclasses.replace(here, chosen=dataclasses.replace(here.chosen, iteration_s=0.0))
    assert not found.pays(same, iterations_left=10**6, switch_s=0.0)


def test_a_run_goes_on_where_nothing_can_be_planned(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(observed: Observed) -> Plan:
        raise UsageError("no placement is left: give less")

    plan = as_measured(make_plan(CARTPOLE))
    with running() as (on, options, checks):
        load = At(14, lambda: setattr(on.clock, "competing_load", 6.0))
        acts = [checks, load]
        result = train(plan, total_steps=30 * ROWS, callbacks=acts, replan=refuse, **options)
    assert result.iterations == 30 and checks.checks
    assert "cannot plan again: no placement is left: give less" in caplog.text


@pytest.mark.slow
def test_load_on_the_cpu_moves_a_calibrated_run_to_the_accelerator_to_stay() -> None:
    spec = load_spec("desktop_fast_gpu")
    work = next(work for work in spec.workloads if work.name == "big net")
    calibration = calibrate_machine(spec, [env_of(work)], quick=True)
    plan = plan_for(calibration, workload_of(work), scheme="cpu")
    checks = Checks()
    with EmulatedMachine(spec, dry=True) as on:
        load = At(6, lambda: setattr(on.clock, "competing_load", 30.0))
        result = train(
            plan,
            total_steps=30 * plan.workload.hyperparameters.rollout_rows,
            callbacks=[checks, load],
            witness=EmulatedWitness(on),
            replan=make_replanner(calibration, max_policy_lag=0),
        )
    assert result.switches == 1 and result.plan is not None
    assert result.plan.placement.learn_device == D
    assert result.plan.placement.minibatch_rows == plan.placement.minibatch_rows
    loaded = checks.checks[0].iteration_s
    assert checks.reports[-1].iteration_s < 0.9 * loaded  # though the load has not gone
