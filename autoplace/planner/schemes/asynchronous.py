"""``async``: sampler processes that each fill their share of a rollout, and a learner beside them.

==========  ========================================================================================
symbol      meaning
==========  ========================================================================================
W, N        sampler processes, environments: each process steps N / W of them
T           vector steps in a rollout
L           iterations that the policy which samples may be behind
S, M        seconds of a process's part of a rollout, and of learning from a rollout
s, e        standard deviation of a part, expected maximum of W standard normals
==========  ========================================================================================

A process goes on with its next part at once, unless that would need weights more than L iterations
old; the learner takes a rollout when all its parts are there. So an iteration takes as long as the
slower of the two (stretched where processes and learner exceed the cores), but no less than
``(S + M) / (L + 1)``, since L + 1 iterations later a part waits for weights that its rollout made.

Stragglers: were all parts waited for in every iteration, it would be the longest of W parts that
counts, ``S + s e``. A fast process may be ``b = L S - M`` seconds ahead of a slow one before it has
to wait, which is worth many parts in a row: what remains is about ``s e / (1 + b / (s e))``.
"""

from __future__ import annotations

import statistics

import numpy as np
from numpy.typing import NDArray

from autoplace.device_names import CPU
from autoplace.measurement import Task
from autoplace.planner.placements import Placements
from autoplace.planner.plan import Placement
from autoplace.planner.schemes.base import (
    Array,
    Axes,
    Scheme,
    Sides,
    Span,
    Timing,
    Work,
    combinations,
    reads,
)
from autoplace.planner.schemes.layout import busy_s, in_sequence, interleaved, overlapped, wait
from autoplace.planner.schemes.remote import (
    LEARNER_WORK,
    learner_keys,
    learners,
    message,
    state_copy,
)
from autoplace.planner.schemes.work import POLICY_STEP_FIELDS, env_step_work, policy_step_work
from autoplace.workload import Workload

_SAMPLING = [("policy_step", "sampler"), ("env_step", "sampler"), ("handoff", "sampler")]


def _placements(axes: Axes, num_envs: int, steps: int) -> Placements:
    """Learners of several threads share no core: they would collapse.

    One process does what ``double-buffer`` does without it, so it is left to where several do not
    fit.
    """
    if axes.usable_cpus < 2:
        return Placements.empty()
    several = any(1 < count <= axes.usable_cpus for _, count in axes.samplers)
    samplers = [entry for entry in axes.samplers if entry[1] > 1 or not several]
    sides = [Sides("cpu", device, 1, threads) for device, threads in learners(axes)]
    found = combinations(
        axes, num_envs, sides, (steps,), backends=samplers, policy_lags=axes.policy_lags
    )
    threads = found.num_workers + found.learn_threads
    return found.where((found.learn_threads == 1) | (threads <= axes.usable_cpus))


@reads(*POLICY_STEP_FIELDS)
def _policy_step(workload: Workload, placement: Placement) -> Work:
    rows = placement.num_envs // placement.num_workers
    return policy_step_work(workload, placement, rows=rows)


@reads("num_envs", "num_workers", "num_groups", "env_backend")
def _env_step(workload: Workload, placement: Placement) -> Work:
    num_envs = placement.num_envs // placement.num_workers
    return env_step_work(workload, placement, num_envs=num_envs)


def _published(workload: Workload, placement: Placement) -> Task:
    return Task(op="elementwise", shape=(workload.network.num_parameters,))


_IN_OWN_PROCESS = message("learner", _published)
_COORDINATED = message("learner", state_copy, _published, ways=2)


@reads(*_COORDINATED.fields, "learn_device")
def _told(workload: Workload, placement: Placement) -> Work | None:
    """Parts arrive and weights are published, by the learner itself or by who coordinates it."""
    rule = _IN_OWN_PROCESS if placement.learn_device == CPU else _COORDINATED
    return rule.make(workload, placement)


def straggling_s(
    part_s: Array,
    spread_s: Array,
    learning_s: Array,
    count: NDArray[np.int_],
    lag: NDArray[np.int_],
) -> Array:
    """Seconds by which an iteration is longer than one of ``count`` parts takes in the mean.

    Args:
        part_s: S.
        spread_s: s.
        learning_s: M.
        count: W.
        lag: L.
    """
    longest_s = spread_s * _longest(count)
    ahead_s = np.maximum(0.0, lag * part_s - learning_s)
    # 0 where nothing varies.
    return longest_s / (1 + ahead_s / np.where(longest_s > 0, longest_s, 1.0))


def _longest(count: NDArray[np.int_]) -> Array:
    """By Blom (1958), exact to 5 %: e; one part alone is its own longest."""
    counts, index = np.unique(count, return_inverse=True)
    normal = statistics.NormalDist()
    found = [normal.inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0 for n in counts.tolist()]
    return np.array(found)[index].reshape(count.shape)


def _layout(timing: Timing, placements: Placements) -> tuple[Span, ...]:
    keys = learner_keys(timing)
    count, lag = placements.num_workers, placements.max_policy_lag
    seconds = overlapped(
        timing, placements, _SAMPLING, keys, sampler_threads=count, processes=count
    )
    sampling = interleaved(seconds, [name for name, _ in _SAMPLING[:2]], timing.steps)
    sampling += in_sequence(seconds, _SAMPLING[2:], busy_s(sampling))
    learning = in_sequence(seconds, keys, np.zeros(len(placements)))
    sampled_s, learned_s = busy_s(sampling), busy_s(learning)
    env_s = seconds["env_step", "sampler"]
    spread_s = timing.env_spread_fraction * env_s / np.sqrt(timing.steps)
    all_sampled_s = sampled_s + straggling_s(sampled_s, spread_s, learned_s, count, lag)
    bounded_s = (all_sampled_s + learned_s) / (lag + 1)
    iteration_s = np.maximum(np.maximum(all_sampled_s, learned_s), bounded_s)
    return (
        *sampling,
        *wait("sampler", sampled_s, iteration_s - sampled_s),
        *learning,
        *wait("learner", learned_s, iteration_s - learned_s),
    )


ASYNC = Scheme(
    name="async",
    placements=_placements,
    work=(
        _policy_step,
        _env_step,
        message("sampler"),
        _told,
        *LEARNER_WORK,
    ),
    layout=_layout,
    policy_lag=1,
)
