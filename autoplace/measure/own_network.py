"""The trainer's steps with one workload's own network.

A calibration times perceptrons of many sizes, and a model predicts the others from them. Networks
with an encoder of images, and those of the user's own, are slow to time and rarely needed, so they
are timed when a workload names one.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from autoplace import device
from autoplace.engines import supports
from autoplace.errors import EngineError
from autoplace.measure.grid import thread_counts
from autoplace.measure.probes import build_probe, timed_tasks
from autoplace.measure.timing import Series, run_probe
from autoplace.measurement import Measurement, Task
from autoplace.workload import Workload

log = logging.getLogger(__name__)

# Rows of a minibatch that are timed where the user names none.
MINIBATCH_ROWS = (64, 128, 256, 512)
_TIME_LIMIT_S = 0.5  # for each task
_MIN_SAMPLES = 3
# A task is left to the model where one call of a smaller one like it took longer.
_LONGEST_CALL_S = 2.0


def own_network_tasks(
    workload: Workload,
    devices: Sequence[str],
    usable_cpus: int,
    *,
    minibatch_rows: Sequence[int] = (),
) -> list[Task]:
    """The trainer-step tasks of ``workload``, smaller ones first; none where it needs none.

    Args:
        workload: whose network and sizes.
        devices: canonical names, the CPU among them.
        usable_cpus: which thread counts there are.
        minibatch_rows: what the planner may choose from, where the user left it open.
    """
    network, hyper = workload.network, workload.hyperparameters
    if network.is_plain:
        return []
    given = hyper.minibatch_rows
    sizes = (given,) if given is not None else (minibatch_rows or MINIBATCH_ROWS)
    sizes = tuple(sorted(rows for rows in sizes if rows <= hyper.rollout_rows))
    tasks = []
    for on in devices:
        for threads in thread_counts(usable_cpus) if on == device.CPU else (1,):
            bare = Task(op="policy_step", device=on, threads=threads, network=network)
            engines = [e for e in device.engines_on(on) if supports(e, is_plain=False)]
            for step in (dataclasses.replace(bare, engine=engine) for engine in reversed(engines)):
                tasks.append(dataclasses.replace(step, rows=hyper.num_envs))
                tasks += [dataclasses.replace(step, op="update", rows=rows) for rows in sizes]
            shape = (hyper.rollout_steps, hyper.num_envs)
            tasks.append(dataclasses.replace(bare, op="gae", shape=shape))
        if on != device.CPU:
            tasks.append(Task(op="weights_to_host", device=on, network=network))
    return tasks


def measure_own_network(tasks: Sequence[Task]) -> list[Measurement]:
    """Time trainer-step tasks, for about half a second each."""
    measurements: list[Measurement] = []
    slowest_s: dict[tuple[str, str, int, str], float] = {}
    for task in tasks:
        kind = (task.op, task.device, task.threads, task.engine)
        if slowest_s.get(kind, 0.0) > _LONGEST_CALL_S:
            continue
        series = Series(tasks=timed_tasks(task))
        with device.torch_threads(task.threads, task.engine):
            probe = build_probe(task)
            try:
                run_probe(probe, series, time_limit_s=_TIME_LIMIT_S, min_samples=_MIN_SAMPLES)
            except EngineError as fault:
                log.warning("not timed: %s", fault)
                continue
            finally:
                probe.close()
        found = series.measurements()
        slowest_s[kind] = sum(m.median_s for m in found)
        measurements += found
    return measurements
