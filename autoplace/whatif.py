"""Step times of an environment on a machine where it was never timed.

======================  ===========================================================================
symbol                  meaning
======================  ===========================================================================
e                       seconds of one step of one environment on one thread
n, W                    environments stepped together, worker processes
x                       seconds of one exchange with one worker: actions over, results back
h                       seconds of one hand-off: a small message to a process and its answer
======================  ===========================================================================

In-process, a vector step takes n e. Spread over workers it takes x + (W - 1) h / 2 + ceil(n / W) e:
the sender's half of a hand-off, sending and receiving, is spent on one worker after the other.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

from autoplace.errors import CalibrationError, UsageError
from autoplace.measure.grid import thread_counts
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.workload import EnvSpec

IN_PROCESS, PROCESSES = "sync", "process"
_HANDOFF = Task(op="handoff")
# An exchange in hand-offs: median over the environments of the calibration of the 2-core reference
# machine that were timed with workers.
_HANDOFFS_PER_EXCHANGE = 4.0


def speed_ratio(here: Calibration, there: Calibration) -> float:
    """How many times as long as ``here`` one thread needs ``there``.

    The time to issue one small operation stands for it: like the step of an environment it is
    bound by the interpreter and by branching code on one thread.

    Raises:
        CalibrationError: one of the two lacks that time.
    """
    issue = Task(op="dispatch")
    for calibration in (here, there):
        if issue not in calibration.by_task:
            raise CalibrationError(
                f"the calibration of {calibration.machine.cpu_model} has no single-thread rate: "
                "give --env-step-time SECONDS"
            )
    return there.by_task[issue].median_s / here.by_task[issue].median_s


def scaled_steps(
    env: EnvSpec, here: Calibration, there: Calibration, num_envs: int
) -> list[Measurement]:
    """Step times ``there`` from those that were measured ``here``, by :func:`speed_ratio`.

    Numbers of workers that only ``there`` has the CPUs for follow from the times of fewer.
    """
    ratio = speed_ratio(here, there)
    cpus = there.machine.usable_cpus
    steps = [
        Measurement(
            task=m.task,
            times_s=(ratio * m.median_s,),
            origin="scaled",
            valid_fraction=m.valid_fraction,
            episodes=m.episodes and dataclasses.replace(m.episodes, end_s=ratio * m.episodes.end_s),
            cold_s=tuple((engine, ratio * seconds) for engine, seconds in m.cold_s),
        )
        for m in here.measurements
        if m.task.op == "env_step" and m.task.env == env and m.task.workers <= cpus
    ]
    single_s, exchange_s = _step_and_exchange(steps)
    handoff = there.by_task.get(_HANDOFF)
    if exchange_s is None or handoff is None:  # too fast for workers to be timed, or one CPU
        return steps
    timed = {m.task for m in steps}
    more = _worker_steps(env, single_s, exchange_s, handoff.median_s, cpus, num_envs, "scaled")
    return steps + [m for m in more if m.task not in timed]


def given_steps(
    env: EnvSpec, step_s: float, calibration: Calibration, num_envs: int
) -> list[Measurement]:
    """Step times on the calibrated machine where one environment's step takes ``step_s``.

    Raises:
        UsageError: that is no time.
    """
    if not (math.isfinite(step_s) and step_s > 0):
        raise UsageError(f"--env-step-time is in seconds and above 0, got {step_s:g}: change it")
    steps = [
        Measurement(
            task=Task(op="env_step", env=env, backend=IN_PROCESS, num_envs=number),
            times_s=(number * step_s,),
            origin="given",
        )
        for number in dict.fromkeys((1, num_envs))
    ]
    handoff = calibration.by_task.get(_HANDOFF)
    if handoff is None:  # a single CPU
        return steps
    handoff_s, cpus = handoff.median_s, calibration.machine.usable_cpus
    exchange_s = _HANDOFFS_PER_EXCHANGE * handoff_s
    return [*steps, *_worker_steps(env, step_s, exchange_s, handoff_s, cpus, num_envs, "given")]


def with_steps(calibration: Calibration, env: EnvSpec, steps: Iterable[Measurement]) -> Calibration:
    """The calibration with these step times of ``env`` in place of any that it has."""
    others = tuple(
        m for m in calibration.measurements if m.task.op != "env_step" or m.task.env != env
    )
    return dataclasses.replace(calibration, measurements=others).with_measurements(steps)


def _worker_steps(
    env: EnvSpec,
    step_s: float,
    exchange_s: float,
    handoff_s: float,
    cpus: int,
    num_envs: int,
    origin: str,
) -> Iterator[Measurement]:
    for workers in thread_counts(cpus):
        for number in sorted({1, workers, num_envs}):
            if workers <= number <= num_envs:
                all_exchange_s = exchange_s + (workers - 1) / 2 * handoff_s
                yield Measurement(
                    task=Task(
                        op="env_step",
                        env=env,
                        backend=PROCESSES,
                        num_envs=number,
                        workers=workers,
                    ),
                    times_s=(all_exchange_s + math.ceil(number / workers) * step_s,),
                    origin=origin,
                )


def _step_and_exchange(steps: Sequence[Measurement]) -> tuple[float, float | None]:
    """Step time of the largest in-process vector step; the median exchange of all with workers."""
    single_s = max(
        (m.task.num_envs, m.median_s / m.task.num_envs)
        for m in steps
        if m.task.backend == IN_PROCESS
    )[1]
    exchanges = [
        max(m.median_s - math.ceil(m.task.num_envs / m.task.workers) * single_s, 0.0)
        for m in steps
        if m.task.backend == PROCESSES
    ]
    return single_s, statistics.median(exchanges) if exchanges else None
