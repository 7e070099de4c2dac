"""``async``: sampler processes that each fill their share of a rollout, and a learner process.

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

import math
import statistics
from collections.abc import Iterator

from autoplace.measurement import Task
from autoplace.planner.plan import Placement
from autoplace.planner.schemes.base import Axes, Scheme, Sides, Span, Timing, Work, combinations
from autoplace.planner.schemes.layout import busy_s, in_sequence, interleaved, overlapped, wait
from autoplace.planner.schemes.remote import (
    learner_keys,
    learner_works,
    learners,
    message,
    state_copy,
)
from autoplace.planner.schemes.work import env_step, per_step
from autoplace.workload import Workload

_SAMPLING = [("policy_step", "sampler"), ("env_step", "sampler"), ("handoff", "sampler")]


def _placements(axes: Axes, num_envs: int, steps: int) -> Iterator[Placement]:
    """Learners of several threads share no core: they would collapse.

    One process does what ``double-buffer`` does without it, so it is left to where several do not
    fit.
    """
    if axes.usable_cpus < 2:
        return
    several = any(1 < count <= axes.usable_cpus for _, count in axes.samplers)
    samplers = [entry for entry in axes.samplers if entry[1] > 1 or not several]
    sides = [Sides("cpu", device, 1, threads) for device, threads in learners(axes)]
    for lag in axes.policy_lags:
        for placement in combinations(
            axes, num_envs, sides, (steps,), backends=samplers, policy_lag=lag
        ):
            threads = placement.num_workers + placement.learn_threads
            if placement.learn_threads == 1 or threads <= axes.usable_cpus:
                yield placement


def _work(workload: Workload, placement: Placement) -> tuple[Work, ...]:
    num_envs = placement.num_envs // placement.num_workers
    published = Task(op="elementwise", shape=(workload.network.num_parameters,))
    return (
        per_step("policy_step", workload, placement, rows=num_envs),
        env_step(workload, placement, num_envs=num_envs),
        message("sampler"),
        message("learner", state_copy(workload, placement), published, ways=2),
        *learner_works(workload, placement),
    )


def straggling_s(part_s: float, spread_s: float, learning_s: float, count: int, lag: int) -> float:
    """Seconds by which an iteration is longer than one of ``count`` parts takes in the mean.

    Args:
        part_s: S.
        spread_s: s.
        learning_s: M.
        count: W.
        lag: L.
    """
    # e by Blom (1958), exact to 5 %.
    expected = (
        statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0
    )
    longest_s = spread_s * expected
    if not longest_s:
        return 0.0
    return longest_s / (1 + max(0.0, lag * part_s - learning_s) / longest_s)


def _layout(timing: Timing, placement: Placement) -> tuple[Span, ...]:
    keys = learner_keys(timing)
    count, lag = placement.num_workers, placement.max_policy_lag
    seconds = overlapped(timing, placement, _SAMPLING, keys, sampler_threads=count, processes=count)
    sampling = interleaved(seconds, [name for name, _ in _SAMPLING[:2]], timing.steps)
    sampling += in_sequence(seconds, _SAMPLING[2:], busy_s(sampling))
    learning = in_sequence(seconds, keys, 0.0)
    sampled_s, learned_s = busy_s(sampling), busy_s(learning)
    env_s = seconds["env_step", "sampler"]
    spread_s = timing.env_spread_fraction * env_s / math.sqrt(timing.steps)
    all_sampled_s = sampled_s + straggling_s(sampled_s, spread_s, learned_s, count, lag)
    iteration_s = max(all_sampled_s, learned_s, (all_sampled_s + learned_s) / (lag + 1))
    return (
        *sampling,
        *wait("sampler", sampled_s, iteration_s - sampled_s),
        *learning,
        *wait("learner", learned_s, iteration_s - learned_s),
    )


ASYNC = Scheme(
    name="async",
    placements=_placements,
    work=_work,
    layout=_layout,
    policy_lag=1,
    learner_processes=1,
)
