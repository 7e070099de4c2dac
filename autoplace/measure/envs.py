"""Step times of an environment, by vector backend and number of environments."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoplace import device
from autoplace.envs import (
    BACKENDS,
    EnvDescription,
    inspect_env,
    make_vector_env,
    spawn_seeds,
    usable_backend,
)
from autoplace.envs.recorder import OutcomeRecorder
from autoplace.measure.env_start import measure_env_start
from autoplace.measure.timing import Probe, Series, other_work, run_probe
from autoplace.measurement import Measurement, Task
from autoplace.workload import EnvSpec

_SEED = 0
_ACTION_ROWS = 64  # actions drawn beforehand and cycled through
# Seconds for each measurement; a sample is long enough to hold several episodes of a fast env.
_TIME_LIMIT_S = 0.6
_SAMPLE_S = 0.02
_SLOW_TO_MAKE_S = 0.5
# Where processes step, what they meet in a run counts: they have been asleep while the other side
# learned, and between two steps a policy acts. Seconds of both.
_LEARNING_S = 0.01
_ACTING_S = 2e-5
# A vector step that is shorter than this is not worth spreading over processes: handing over and
# waking up take a good part of it.
_WORKERS_MAY_PAY_S = 2e-4


def env_tasks(
    env: EnvSpec,
    nums_envs: Sequence[int],
    num_workers: Sequence[int] = (),
    *,
    backend: str | None = None,
    description: EnvDescription | None = None,
) -> list[Task]:
    """One task per backend that can run ``env``, number of environments and number of workers.

    Args:
        env: which environment.
        nums_envs: environments stepped together.
        num_workers: for backends with workers, see :func:`worker_counts`; none is timed with
            more workers than environments.
        backend: only this one; one with dynamics of its own is timed where it is named only.
        description: of ``env``, where it has been made before.
    """
    description = description or inspect_env(env)
    tasks = []
    for entry in BACKENDS:
        wanted = entry.name == backend if backend is not None else not entry.has_own_dynamics
        if not wanted or not entry.supports(description):
            continue
        fewest = 2 if entry.joins else 1  # alone, the caller would do what `sync` does
        for number in dict.fromkeys(nums_envs):
            counts = [c for c in num_workers if fewest <= c <= number] if entry.has_workers else [0]
            tasks += [
                Task(op="env_step", env=env, backend=entry.name, num_envs=number, workers=workers)
                for workers in dict.fromkeys(counts)
            ]
    return tasks


def worker_counts(usable_cpus: int) -> tuple[int, ...]:
    """Numbers of workers worth timing: powers of two, and as many as there are CPUs."""
    powers = itertools.takewhile(lambda n: n < usable_cpus, (2**k for k in itertools.count()))
    return (*powers, usable_cpus)


def part_sizes(num_envs: int, usable_cpus: int) -> tuple[int, ...]:
    """Environments per sampler process where all CPUs sample, or all but the learner's one."""
    counts = (
        max(count for count in range(1, num_envs + 1) if num_envs % count == 0 and count <= most)
        for most in (max(usable_cpus - 1, 1), usable_cpus)
    )
    return tuple(dict.fromkeys(num_envs // count for count in counts))


def measure_backends(
    env: EnvSpec,
    nums_envs: Sequence[int],
    usable_cpus: int,
    description: EnvDescription | None = None,
) -> list[Measurement]:
    """Time an environment under every backend that may pay.

    In-process backends are timed with the parts too that sampler processes would step. Worker
    processes are left out where all environments are stepped in less than it takes to hand
    actions over and results back: there they cannot gain. The start of a process that makes such
    environments is timed too, with what they hold in memory.
    """
    known = description or inspect_env(env)
    numbers = (*nums_envs, *part_sizes(max(nums_envs), usable_cpus))
    measurements = measure_env(env, env_tasks(env, numbers, description=known), known)
    slowest_s = max(
        min(m.median_s for m in measurements if m.task.num_envs == number) for number in nums_envs
    )
    if usable_cpus > 1 and slowest_s > _WORKERS_MAY_PAY_S:
        tasks = env_tasks(env, nums_envs, worker_counts(usable_cpus), description=known)
        measurements += measure_env(env, [task for task in tasks if task.workers], known)
    return measurements + measure_env_start(env, known)


def measure_backend(
    env: EnvSpec, backend: str, nums_envs: Sequence[int], usable_cpus: int
) -> list[Measurement]:
    """Time an environment under one backend, whether it may pay or not.

    Raises:
        UsageError: there is no such backend, or it cannot run the environment.
    """
    known = inspect_env(env)
    usable_backend(backend, known)
    workers = worker_counts(usable_cpus)
    tasks = env_tasks(env, nums_envs, workers, backend=backend, description=known)
    return measure_env(env, tasks, known)


def measure_env(
    env: EnvSpec, tasks: Sequence[Task], description: EnvDescription | None = None
) -> list[Measurement]:
    """Time vector steps of ``env`` under random actions.

    As in the trainer, resets and the recording of rewards and flags are part of a step. Tasks are
    visited twice, the second time in reverse order, so that a machine whose speed changes meanwhile
    changes it for all alike; environments that are slow to make are made and visited once.

    Args:
        env: which environment.
        tasks: from :func:`env_tasks`.
        description: of ``env``, where it has been made before.

    Raises:
        EnvError: it cannot be made, or misbehaves.
    """
    description = description or inspect_env(env)
    timed = [(Series(tasks=(task,)), _Rows()) for task in tasks]
    slow = set[Task]()
    for visited in (timed, timed[::-1]):
        for series, rows in visited:
            (task,) = series.tasks
            if task in slow:
                continue
            start_s = device.now()
            probe = _env_step(task, description, rows)
            if device.now() - start_s > _SLOW_TO_MAKE_S:
                slow.add(task)
            share = 1 if task in slow else 2
            try:
                run_probe(probe, series, time_limit_s=_TIME_LIMIT_S / share, min_samples=5)
            finally:
                probe.close()
    return [
        dataclasses.replace(m, valid_fraction=1 - rows.resets / rows.total)
        for series, rows in timed
        for m in series.measurements()
    ]


@dataclass(slots=True)
class _Rows:
    """How many there were, and how many of them only reset an environment."""

    total: int = 0
    resets: int = 0


def _env_step(task: Task, description: EnvDescription, rows: _Rows) -> Probe:
    assert task.backend is not None
    envs = make_vector_env(
        description, num_envs=task.num_envs, backend=task.backend, num_workers=task.workers
    )
    envs.reset(spawn_seeds(_SEED, task.num_envs))
    rng = np.random.default_rng(_SEED)
    actions = description.actions.random(rng, _ACTION_ROWS, task.num_envs)
    outcomes = np.empty((_ACTION_ROWS, 3, task.num_envs), np.float32)
    recorder = OutcomeRecorder(outcomes)
    count = 0

    def sample(calls: int) -> tuple[float]:
        nonlocal count
        elapsed_s = 0.0
        if task.workers:
            other_work(_LEARNING_S)
        for _ in range(calls):
            row = count % _ACTION_ROWS
            if task.workers:
                other_work(_ACTING_S)
            start_s = device.now()
            step = envs.step(actions[row])
            recorder.record(row, step)
            if row == _ACTION_ROWS - 1:
                recorder.take_finals(description.observation_size)
            elapsed_s += device.now() - start_s
            count += 1
            rows.total += task.num_envs
            if step.valid is not None:
                rows.resets += int(np.count_nonzero(~step.valid))
        return (elapsed_s / calls,)

    # A few steps tell how many make up a sample.
    per_step_s = max(sample(8)[0], 1e-7)
    calls = max(1, min(2000, round(_SAMPLE_S / per_step_s)))
    return Probe(
        tasks=(task,),
        sample=sample,
        min_calls=calls,
        max_calls=calls,
        close=envs.close,
    )
