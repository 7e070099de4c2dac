"""Step times of an environment, by vector backend and number of environments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from autoplace import device
from autoplace.envs import BACKENDS, EnvDescription, inspect_env, make_vector_env, spawn_seeds
from autoplace.envs.episodes import EpisodeTracker
from autoplace.envs.recorder import OutcomeRecorder
from autoplace.measure.timing import Probe, Series, run_probe
from autoplace.measurement import Measurement, Task
from autoplace.workload import EnvSpec

_SEED = 0
_ACTION_ROWS = 64  # actions drawn beforehand and cycled through
# Seconds for each measurement; a sample is long enough to hold several episodes of a fast env.
_TIME_LIMIT_S = 0.6
_SAMPLE_S = 0.02


def env_tasks(env: EnvSpec, nums_envs: Sequence[int]) -> list[Task]:
    """One task per backend that can run ``env`` and per number of environments."""
    description = inspect_env(env)
    return [
        Task(op="env_step", env=env, backend=backend.name, num_envs=number)
        for backend in BACKENDS
        if backend.supports(description)
        for number in dict.fromkeys(nums_envs)
    ]


def measure_env(env: EnvSpec, tasks: Sequence[Task]) -> list[Measurement]:
    """Time vector steps of ``env`` under random actions.

    As in the trainer, resets and the recording of rewards, flags and episodes are part of a step.

    Raises:
        EnvError: it cannot be made, or misbehaves.
    """
    description = inspect_env(env)
    measurements = []
    for task in tasks:
        series = Series(tasks=(task,))
        probe = _env_step(task, description)
        try:
            run_probe(probe, series, time_limit_s=_TIME_LIMIT_S, min_samples=5)
        finally:
            probe.close()
        measurements += series.measurements()
    return measurements


def _env_step(task: Task, description: EnvDescription) -> Probe:
    assert task.backend is not None
    envs = make_vector_env(description, num_envs=task.num_envs, backend=task.backend)
    envs.reset(spawn_seeds(_SEED, task.num_envs))
    rng = np.random.default_rng(_SEED)
    actions: np.ndarray
    if description.continuous:
        actions = rng.standard_normal(
            (_ACTION_ROWS, task.num_envs, description.action_size), dtype=np.float32
        )
    else:
        actions = rng.integers(description.action_size, size=(_ACTION_ROWS, task.num_envs))
    outcomes = torch.empty(_ACTION_ROWS, 3, task.num_envs)
    recorder = OutcomeRecorder(outcomes, EpisodeTracker(task.num_envs))
    count = 0

    def sample(calls: int) -> tuple[float]:
        nonlocal count
        start_s = device.now()
        for _ in range(calls):
            row = count % _ACTION_ROWS
            recorder.record(row, envs.step(actions[row]))
            count += 1
        elapsed_s = device.now() - start_s
        recorder.take_finals(description.observation_size)
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
