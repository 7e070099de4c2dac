"""The trainer's steps by an engine that takes long to make them ready, for one workload's network.

Each step's first call holds that one-off work. What it took, policy step and gradient step
together, becomes a task of its own: whether the engine pays depends on how long a run is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autoplace import device
from autoplace.errors import EngineError, brief
from autoplace.measure.own_network import MINIBATCH_ROWS
from autoplace.measure.probes import build_probe, timed_tasks
from autoplace.measure.timing import Series, run_probe
from autoplace.measurement import Measurement, Task
from autoplace.workload import Workload

_TIME_LIMIT_S = 0.5  # for each task, its first call left out


def engine_tasks(
    engine: str,
    workload: Workload,
    devices: Sequence[str],
    usable_cpus: int,
    *,
    minibatch_rows: Sequence[int] = (),
) -> list[Task]:
    """Policy steps and gradient steps of ``workload`` by an engine; sizes between are left out.

    Args:
        engine: by which.
        workload: whose network and sizes.
        devices: canonical names, the CPU among them.
        usable_cpus: the most threads.
        minibatch_rows: what the planner may choose from, where the user left it open.
    """
    hyper = workload.hyperparameters
    given = hyper.minibatch_rows
    sizes = [given] if given is not None else sorted(minibatch_rows or MINIBATCH_ROWS)
    tasks = []
    for on in devices:
        for threads in sorted({1, usable_cpus if on == device.CPU else 1}):
            bare = Task(
                op="policy_step",
                device=on,
                threads=threads,
                network=workload.network,
                engine=engine,
            )
            is_standardized = workload.standardizes_observations
            tasks.append(
                dataclasses.replace(bare, rows=hyper.num_envs, standardized=is_standardized)
            )
            ends = dict.fromkeys((sizes[0], sizes[-1]))
            tasks += [dataclasses.replace(bare, op="update", rows=rows) for rows in ends]
    return tasks


def measure_engine(tasks: Sequence[Task]) -> list[Measurement]:
    """Time the tasks of :func:`engine_tasks`, and what making them ready took.

    Raises:
        EngineError: the engine cannot run one.
    """
    if tasks and not device.spawns_processes():
        raise EngineError(f"engine {tasks[0].engine} cannot be timed by a virtual clock")
    measurements: list[Measurement] = []
    policy_s: dict[tuple[str, int], float] = {}  # to make its policy step ready
    for task in tasks:
        with device.torch_threads(task.threads, task.engine):
            first_s, found = _measure(task)
        once_s = max(first_s - sum(m.median_s for m in found), 0.0)
        measurements += found
        if task.op == "policy_step":
            policy_s[task.device, task.threads] = once_s
        else:
            ready = dataclasses.replace(task, op="engine_setup")
            both_s = once_s + policy_s[task.device, task.threads]
            measurements.append(Measurement(task=ready, times_s=(max(both_s, 1e-9),)))
    return measurements


def _measure(task: Task) -> tuple[float, list[Measurement]]:
    """Seconds of the first call, and those of later ones."""
    series = Series(tasks=timed_tasks(task))
    try:
        probe = build_probe(task)
        try:
            start_s = device.now()
            probe.sample(1)
            first_s = device.now() - start_s
            run_probe(probe, series, time_limit_s=_TIME_LIMIT_S)
        finally:
            probe.close()
    except Exception as error:  # whatever a compiler or a driver raises
        raise EngineError(
            f"engine {task.engine} does not work on {task.device} ({brief(error)})"
        ) from error
    return first_s, series.measurements()
