"""Step times of an environment, by vector backend and number of environments."""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median

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
from autoplace.envs.vector import Step
from autoplace.measure.acting import host_policy_step, seconds_of, seconds_per_call
from autoplace.measure.env_start import measure_env_start
from autoplace.measure.timing import Probe, Series, other_work, run_probe
from autoplace.measurement import Episodes, Measurement, Task
from autoplace.workload import EnvSpec, Hyperparameters

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
_SHARE_OF_OTHERS = 4  # of as many steps each other engine than the best gets one
_POLICY_STEPS_ALONE = 20  # in a row, which find their own code in the caches
# Vector steps with another number of ends of episodes than most, to tell what an end takes.
_STEPS_TO_COMPARE = 10
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


@device.torch_threads(1)
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
    timed = [(Series(tasks=(task,)), _Steps(description.episode_limit)) for task in tasks]
    slow = set[Task]()
    for visited in (timed, timed[::-1]):
        for series, steps in visited:
            (task,) = series.tasks
            if task in slow:
                continue
            start_s = device.now()
            probe = _env_step(task, description, steps)
            if device.now() - start_s > _SLOW_TO_MAKE_S:
                slow.add(task)
            share = 1 if task in slow else 2
            try:
                run_probe(probe, series, time_limit_s=_TIME_LIMIT_S / share, min_samples=5)
            finally:
                probe.close()
    return [
        dataclasses.replace(
            m,
            valid_fraction=steps.valid_fraction,
            episodes=steps.episodes,
            cold_s=steps.cold_s,
        )
        for series, steps in timed
        for m in series.measurements()
    ]


class _Steps:
    """The vector steps that were timed, one by one, and which of them ended episodes."""

    def __init__(self, episode_limit: int | None) -> None:
        self._limit = episode_limit
        self._seconds, self._ends = array("d"), array("q")
        self._rows = self._resets = self._episodes = 0
        self._cold_s = defaultdict[str, list[float]](list)

    def add_cold(self, engine: str, seconds: float) -> None:
        """Note what policy steps behind vector steps took more than others, on average."""
        self._cold_s[engine].append(seconds)

    @property
    def cold_s(self) -> tuple[tuple[str, float], ...]:
        """The median of that by engine."""
        return tuple((name, max(median(found), 0.0)) for name, found in self._cold_s.items())

    def add(self, seconds: float, step: Step) -> None:
        """Note a vector step."""
        ends = len(step.ended)
        resets = 0 if step.valid is None else int(np.count_nonzero(~step.valid))
        self._rows += len(step.rewards)
        self._resets += resets
        self._episodes += ends
        self._seconds.append(seconds)
        self._ends.append(ends + resets)  # where a reset has a step of its own, either may cost

    @property
    def valid_fraction(self) -> float:
        """Share of the rows that were transitions; the others only reset an environment."""
        return 1 - self._resets / self._rows

    @property
    def episodes(self) -> Episodes | None:
        """How they ended; ``None`` where too few did to tell."""
        seconds, ends = np.frombuffer(self._seconds), np.frombuffer(self._ends, np.int64)
        numbers, often = np.unique(ends, return_counts=True)
        if often.sum() - often.max() < _STEPS_TO_COMPARE:
            return None
        # A line through the median step of each number of ends; means go by the slowest steps.
        middle_s = [np.median(seconds[ends == number]) for number in numbers]
        slope_s, _ = np.polyfit(numbers, middle_s, 1, w=np.sqrt(often))
        return Episodes(
            end_s=max(float(slope_s * ends.sum() / self._episodes), 0.0),
            steps=(self._rows - self._resets) / self._episodes,
            limit=self._limit,
        )


def _policies(
    description: EnvDescription, observations: np.ndarray
) -> list[tuple[str, Callable[[int], object]]]:
    """The policy step of each engine that is ready at once, the one to know best first.

    With the default network. There are none for images: one takes far longer than its code takes
    to come into the caches.
    """
    spec = description.network(Hyperparameters().hidden_sizes)
    if not spec.is_plain:
        return []
    return [
        (engine, host_policy_step(spec, observations, engine, standardized=False))
        for engine in reversed(device.engines_on(device.CPU))
    ]


def _env_step(task: Task, description: EnvDescription, steps: _Steps) -> Probe:
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
    policies = _policies(description, envs.observations)

    def step() -> float:
        nonlocal count
        row = count % _ACTION_ROWS
        start_s = device.now()
        step = envs.step(actions[row])
        recorder.record(row, step)
        if row == _ACTION_ROWS - 1:
            recorder.take_finals(description.observation_size)
        seconds = device.now() - start_s
        count += 1
        steps.add(seconds, step)
        return seconds

    def in_turns(act: Callable[[int], object], calls: int) -> tuple[float, float]:
        """Seconds of a policy step and of a vector step, one after the other as in a run."""
        policy_s = step_s = 0.0
        for call in range(calls):
            policy_s += seconds_of(act, call)
            step_s += step()
        return policy_s / calls, step_s / calls

    def sample(calls: int) -> tuple[float]:
        if task.workers:
            other_work(_LEARNING_S)
        if not policies:
            return (in_turns(lambda _: other_work(_ACTING_S), calls)[1],)
        (_, best), *others = policies
        found = [in_turns(best, calls)]
        # Others make vector steps slower, too; where one takes long, it is all that counts.
        few = calls // _SHARE_OF_OTHERS
        found += [in_turns(act, few) for _, act in others if few]
        for (engine, act), (policy_s, step_s) in zip(policies, found, strict=False):
            seconds_per_call(act, _POLICY_STEPS_ALONE)  # which brings its code into the caches
            alone_s = seconds_per_call(act, _POLICY_STEPS_ALONE)
            steps.add_cold(engine, policy_s - alone_s + step_s - found[0][1])
        return (found[0][1],)

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
