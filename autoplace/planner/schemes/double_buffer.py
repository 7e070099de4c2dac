"""``double-buffer``: one rollout is sampled on the CPU while the other is learned from.

==========  ========================================================================================
symbol      meaning
==========  ========================================================================================
S, M        seconds of sampling a rollout, and of learning from one
h, m        seconds of the sampler's hand-over (copies, and sending), and of a message on its way
==========  ========================================================================================

Both sides start together and the faster one waits. A learner that is the slower one is waited for
until its answer has arrived, and goes on when the next order has: an iteration takes
``max(S, M + 2 m) + h``, its stages stretched where the cores do not suffice for both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

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

_SAMPLING = [("policy_step", "sampler"), ("env_step", "sampler")]


def _placements(axes: Axes, num_envs: int, steps: int) -> Iterator[Placement]:
    """Every core works for one side only: threads of both, and workers, fit into the CPUs."""
    pairs = itertools.product(learners(axes), axes.sample_threads)
    sides = [Sides("cpu", device, threads, learning) for (device, learning), threads in pairs]
    for placement in combinations(axes, num_envs, sides, (steps,), policy_lag=1):
        if _sampling_threads(placement) + placement.learn_threads <= axes.usable_cpus:
            yield placement


def _sampling_threads(placement: Placement) -> int:
    if placement.num_groups > 1:  # policy and workers at once
        return placement.sample_threads + placement.num_workers
    return max(placement.sample_threads, placement.num_workers)


def _work(workload: Workload, placement: Placement) -> tuple[Work, ...]:
    return (
        per_step("policy_step", workload, placement),
        env_step(workload, placement),
        message("sampler", state_copy(workload, placement)),
        message("learner"),
        *learner_works(workload, placement),
    )


def _layout(timing: Timing, placement: Placement) -> tuple[Span, ...]:
    keys = learner_keys(timing)
    seconds = overlapped(
        timing, placement, _SAMPLING, keys, sampler_threads=_sampling_threads(placement)
    )
    sampling = interleaved(seconds, [name for name, _ in _SAMPLING], timing.steps)
    learning = in_sequence(seconds, keys, 0.0)
    sampled_s, learned_s = busy_s(sampling), busy_s(learning)
    answer_s, handoff_s = seconds["handoff", "learner"], timing.seconds["handoff", "sampler"]
    met_s = max(sampled_s, learned_s + answer_s)
    return (
        *sampling,
        *wait("sampler", sampled_s, met_s - sampled_s),
        Span(name="handoff", lane="sampler", start_s=met_s, total_s=handoff_s),
        *learning,
        *wait("learner", learned_s, met_s + handoff_s - learned_s),
    )


DOUBLE_BUFFER = Scheme(
    name="double-buffer",
    placements=_placements,
    work=_work,
    layout=_layout,
    policy_lag=1,
    learner_processes=1,
)
