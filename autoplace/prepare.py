"""A calibration that is ready to plan with: stored or made now, with the environment's step time.

What the command line and the examples do before every plan, for those who do not want to think
about calibrations at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autoplace import store
from autoplace.engines import TIMED_WHERE_NAMED
from autoplace.errors import CalibrationError, EngineError
from autoplace.machine import detect_machine
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.planner.choices import OWN_DYNAMICS, minibatch_choices
from autoplace.sections import is_of_env, what_holds
from autoplace.units import format_seconds, significant
from autoplace.whatif import given_steps, scaled_steps, speed_ratio, with_steps
from autoplace.workload import Workload

if TYPE_CHECKING:
    from autoplace.measure.calibrate import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A calibration, and what had to be done for it.

    Attributes:
        calibration: holds the workload's environment.
        notes: one line for each thing that was measured or found wrong on the way.
        engine_works: whether the engine that was asked for could be timed, where it had to be.
    """

    calibration: Calibration
    notes: tuple[str, ...] = ()
    engine_works: bool = True


def prepare_calibration(
    workload: Workload,
    *,
    path: Path | None = None,
    env_step_s: float | None = None,
    env_backend: str | None = None,
    engine: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Prepared:
    """The calibration to plan ``workload`` with.

    Without ``path`` that is this machine's stored one; where there is none, or it no longer holds,
    a quick one is made and stored. An environment whose step time it lacks is timed and added.

    With ``path``, perhaps of a machine that is not here, nothing of that file is measured: an
    environment that it lacks gets this machine's step time, scaled by the ratio of their
    single-thread rates.

    Args:
        workload: what is to be planned.
        path: a calibration file.
        env_step_s: seconds of one step of one environment, in place of any that was measured.
        env_backend: one that is asked for, and timed if it never was.
        engine: likewise, where it is timed for single networks only.
        progress: told how far a calibration is.
        note: told each note as it arises.

    Raises:
        CalibrationError: the file cannot be read.
        UsageError: ``env_step_s`` is no time, or ``env_backend`` cannot run the environment.
    """
    notes: list[str] = []
    engine_works = True

    def say(line: str) -> None:
        notes.append(line)
        note(line)

    if path is None:
        calibration = _calibration_here(workload, progress, say, with_env=env_step_s is None)
        if env_backend is not None and env_step_s is None:
            calibration = _with_backend(calibration, workload, env_backend, say)
        if engine in TIMED_WHERE_NAMED:
            try:
                calibration = _with_engine(calibration, workload, str(engine), say)
            except EngineError as fault:
                say(f"{fault}: it is dropped")
                engine_works = False
    else:
        calibration = store.read_calibration(path)
        if calibration.origin == "modelled":
            say(
                f"{path} is modelled from {len(calibration.sources)} published figures, nothing "
                f"was timed on {calibration.machine.name}: every cost is uncertain by a third"
            )
    env = workload.env
    if env_step_s is not None:
        steps = given_steps(env, env_step_s, calibration, _number(workload))
        calibration = with_steps(calibration, env, steps)
        say(f"a step of {env.id} takes {format_seconds(env_step_s)}, as given")
    elif path is not None and not _nums_envs(calibration, workload):
        here = _calibration_here(workload, progress, say)
        ratio = speed_ratio(here, calibration)
        steps = scaled_steps(env, here, calibration, _number(workload))
        calibration = with_steps(calibration, env, steps)
        say(
            f"{path} has no step time of {env.id}: this machine's x {significant(ratio)}, the "
            "ratio of their single-thread rates, extrapolated; --env-step-time SECONDS if you "
            "know better"
        )
    return Prepared(calibration=calibration, notes=tuple(notes), engine_works=engine_works)


def _calibration_here(
    workload: Workload,
    progress: Callable[[Progress], None] | None,
    say: Callable[[str], None],
    *,
    with_env: bool = True,
) -> Calibration:
    """This machine's calibration, with all that the workload needs."""
    machine = detect_machine(accelerators=False)
    found = store.find_calibration(machine)
    lost = [section for section in found.stale if not is_of_env(section)]
    if found.calibration is None or lost:
        problem = str(found.reason).partition(": run autoplace calibrate")[0]
        what = f"timing {', '.join(lost)} again, quickly" if lost else "making a quick one"
        say(f"{problem}: {what} now (autoplace calibrate makes a better one)")
        stored = _quick_calibration(found.calibration, progress)
        _try_to_keep(stored, say)
    else:
        stored = what_holds(found.calibration, machine)
    missing = _missing_steps(stored, workload)
    if missing:
        say(f"timing the trainer's steps with the network of {workload.env.id}, once")
        stored = _with(stored, _step_measurements(missing), say)
    if with_env and not _has_env(stored, workload):
        say(f"timing {workload.env.id}, {_number(workload)} envs")
        stored = _with(stored, _env_measurements(workload, stored), say)
    return stored


def _with_backend(
    stored: Calibration, workload: Workload, backend: str, say: Callable[[str], None]
) -> Calibration:
    if _has_env(stored, workload, backend):
        return stored
    from autoplace.measure.envs import measure_backend  # imports torch

    say(f"timing {workload.env.id} by the backend {backend}, {_number(workload)} envs")
    cpus = stored.machine.usable_cpus
    return _with(stored, measure_backend(workload.env, backend, (1, _number(workload)), cpus), say)


def _with_engine(
    stored: Calibration, workload: Workload, engine: str, say: Callable[[str], None]
) -> Calibration:
    from autoplace.measure.named_engine import engine_tasks, measure_engine  # imports torch

    hyper = workload.hyperparameters
    tasks = engine_tasks(
        engine,
        workload,
        stored.devices,
        stored.machine.usable_cpus,
        minibatch_rows=minibatch_choices(hyper.rollout_rows, hyper.minibatch_rows),
    )
    if all(task in stored.by_task for task in tasks):
        return stored
    say(
        f"timing the trainer's steps by the engine {engine} with the network of "
        f"{workload.env.id}, once: {len(tasks)} steps, some seconds each to make ready"
    )
    return _with(stored, measure_engine(tasks), say)


def _with(
    stored: Calibration, measurements: list[Measurement], say: Callable[[str], None]
) -> Calibration:
    """``stored`` with more measurements, kept for the next time where that is possible."""
    measurements = [Measurement.from_json(m.to_json()) for m in measurements]  # as the next time
    try:
        store.merge_calibration(stored.machine, measurements)
    except CalibrationError as fault:
        say(f"not kept: {fault}")
    return stored.with_measurements(measurements)


def _missing_steps(calibration: Calibration, workload: Workload) -> list[Task]:
    """The trainer's steps that only this workload's network needs and that were never timed.

    Perceptrons need none: the calibration holds enough of them.
    """
    if workload.network.is_plain:
        return []
    from autoplace.measure.own_network import own_network_tasks  # imports torch

    hyper = workload.hyperparameters
    rows = minibatch_choices(hyper.rollout_rows, hyper.minibatch_rows)
    tasks = own_network_tasks(
        workload, calibration.devices, calibration.machine.usable_cpus, minibatch_rows=rows
    )
    return [task for task in tasks if task not in calibration.by_task]


def _step_measurements(tasks: list[Task]) -> list[Measurement]:
    from autoplace.measure.own_network import measure_own_network  # imports torch

    return measure_own_network(tasks)


def _quick_calibration(
    stored: Calibration | None, progress: Callable[[Progress], None] | None
) -> Calibration:
    """A quick one, or what no longer holds of the stored one timed again."""
    from autoplace.measure.calibrate import (  # imports torch
        QUICK_BUDGET_S,
        calibrate,
        recalibrate,
    )

    if stored is not None:
        return recalibrate(stored, quick=True, progress=progress)
    return calibrate(budget_s=QUICK_BUDGET_S, quick=True, progress=progress)


def _try_to_keep(calibration: Calibration, say: Callable[[str], None]) -> None:
    try:
        store.save_calibration(calibration)
    except CalibrationError as fault:  # planning goes on without
        say(f"not kept: {fault}")


def _has_env(calibration: Calibration, workload: Workload, backend: str | None = None) -> bool:
    """Whether the environment was timed, with this number or with others around it."""
    numbers = _nums_envs(calibration, workload, backend)
    return bool(numbers) and min(numbers) <= _number(workload) <= max(numbers)


def _nums_envs(
    calibration: Calibration, workload: Workload, backend: str | None = None
) -> list[int]:
    """Numbers of the environment that were timed together, by ``backend`` or any usual one."""
    tasks = [m.task for m in calibration.measurements]
    return [
        task.num_envs
        for task in tasks
        if task.op == "env_step"
        and task.env == workload.env
        and (task.backend not in OWN_DYNAMICS if backend is None else task.backend == backend)
    ]


def _number(workload: Workload) -> int:
    return workload.hyperparameters.num_envs


def _env_measurements(workload: Workload, calibration: Calibration) -> list[Measurement]:
    from autoplace.measure.envs import measure_backends  # imports torch

    usable_cpus = calibration.machine.usable_cpus
    return measure_backends(workload.env, (1, _number(workload)), usable_cpus)
