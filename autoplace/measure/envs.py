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
from autoplace.measure.acting import ROLLOUT_STEPS, host_policy_step, seconds_of, seconds_per_call
from autoplace.measure.env_start import measure_env_start
from autoplace.measure.timing import Probe, Series, other_work, run_probe
from autoplace.measurement import Episodes, Measurement, Task
from autoplace.ppo.rollout import rollout_bytes
from autoplace.workload import EnvSpec, Hyperparameters

_SEED = 0
_ACTION_ROWS = 64  # actions drawn beforehand and cycled through
# Seconds for each measurement; a sample is long enough to hold several episodes of a fast env.
_TIME_LIMIT_S = 0.6
_SAMPLE_S = 0.02
_SLOW_TO_MAKE_S = 0.5
# Where processes step, what they meet in a run counts: they have been asleep while the other side
# learned. Seconds of that, and of what stands for a policy step that is not taken.
_LEARNING_S = 0.01
_ACTING_S = 2e-5
_FEW_TURNS = 8
_MOST_BYTES = 1 << 25  # of a rollout that policy steps are timed with
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

    As in the trainer, resets and the recording of rewards and flags are part of a step, and steps
    take turns with policy steps. Tasks are
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
        self._seconds, self._ends, self._resets = array("d"), array("q"), array("q")
        self._rows = 0
        self._ends_of_samples: list[float] = []  # for each row
        self._cold_s = defaultdict[str, list[float]](list)

    def add(self, seconds: float, step: Step) -> None:
        """Note a vector step."""
        self._rows += len(step.rewards)
        self._seconds.append(seconds)
        self._ends.append(len(step.ended))
        self._resets.append(0 if step.valid is None else int(np.count_nonzero(~step.valid)))

    def add_sample(self, first: int, num_envs: int) -> None:
        """Note that the steps from number ``first`` on were a sample."""
        ends = self._ends[first:]
        self._ends_of_samples.append(sum(ends) / (len(ends) * num_envs))

    def add_cold(self, engine: str, seconds: float) -> None:
        """Note what policy steps behind vector steps took more than others, on average."""
        self._cold_s[engine].append(seconds)

    @property
    def count(self) -> int:
        """Vector steps so far."""
        return len(self._seconds)

    @property
    def cold_s(self) -> tuple[tuple[str, float], ...]:
        """The median of that by engine."""
        return tuple((name, max(median(found), 0.0)) for name, found in self._cold_s.items())

    @property
    def valid_fraction(self) -> float:
        """Share of the rows that were transitions; the others only reset an environment."""
        return 1 - sum(self._resets) / self._rows

    @property
    def episodes(self) -> Episodes | None:
        """How they ended; ``None`` where too few did to tell."""
        # By the median step of each number of ends and resets: means go by the slowest steps.
        # Where a reset takes a row of its own, either may cost something.
        numbers, which, often = np.unique(
            np.stack((self._ends, self._resets), axis=1),
            axis=0,
            return_inverse=True,
            return_counts=True,
        )
        if often.sum() - often.max() < _STEPS_TO_COMPARE:
            return None
        seconds = np.array(self._seconds)
        middle_s = [np.median(seconds[which.ravel() == index]) for index in range(len(numbers))]
        weights = np.sqrt(often)
        terms = np.column_stack((np.ones(len(numbers)), numbers))
        (_, end_s, reset_s), *_ = np.linalg.lstsq(
            terms * weights[:, None], middle_s * weights, rcond=None
        )
        episodes, resets = sum(self._ends), sum(self._resets)
        return Episodes(
            end_s=max(float(end_s + reset_s * resets / episodes), 0.0),
            steps=(self._rows - resets) / episodes,
            timed_ends=median(self._ends_of_samples),
            limit=self._limit,
        )


def _policies(
    description: EnvDescription, observations: np.ndarray
) -> list[tuple[str, Callable[[int], object]]]:
    """The policy step of each engine that is ready at once, the one to know best first.

    With the default network. There are none for images and other large observations: one takes far
    longer than its code takes to come into the caches.
    """
    spec = description.network(Hyperparameters().hidden_sizes)
    held = rollout_bytes(spec, rollout_steps=ROLLOUT_STEPS, num_envs=len(observations))
    if not spec.is_plain or held > _MOST_BYTES:
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
        outcome = envs.step(actions[row])
        recorder.record(row, outcome)
        if row == _ACTION_ROWS - 1:
            recorder.take_finals(description.observation_size)
        seconds = device.now() - start_s
        count += 1
        steps.add(seconds, outcome)
        return seconds

    def in_turns(act: Callable[[int], object], turns: int) -> tuple[float, float, float]:
        """Seconds of a vector step, of the median one, and of the policy step behind it."""
        policy_s, steps_s = 0.0, []
        for turn in range(turns):
            steps_s.append(step())
            policy_s += seconds_of(act, turn)
        return sum(steps_s) / turns, median(steps_s), policy_s / turns

    best = policies[0][1] if policies else lambda _: other_work(_ACTING_S)
    # A few turns tell how many make up a sample.
    step_s, _, policy_s = in_turns(best, _FEW_TURNS)
    calls = max(1, min(2000, round(_SAMPLE_S / max(step_s + policy_s, 1e-7))))

    def sample(turns: int) -> tuple[float]:
        if task.workers:
            other_work(_LEARNING_S)
        first = steps.count
        found = [in_turns(best, turns)]
        step_s, best_s, _ = found[0]
        if turns < calls:  # to warm up
            return (step_s,)
        steps.add_sample(first, task.num_envs)
        # Others make vector steps slower, too; where one takes long, it is all that counts.
        few = turns // _SHARE_OF_OTHERS
        found += [in_turns(act, few) for _, act in policies[1:] if few]
        for (engine, act), (_, middle_s, policy_s) in zip(policies, found, strict=False):
            seconds_per_call(act, _POLICY_STEPS_ALONE)  # which brings its code into the caches
            alone_s = seconds_per_call(act, _POLICY_STEPS_ALONE)
            steps.add_cold(engine, policy_s - alone_s + middle_s - best_s)
        return (step_s,)

    return Probe(
        tasks=(task,),
        sample=sample,
        min_calls=calls,
        max_calls=calls,
        close=envs.close,
    )
