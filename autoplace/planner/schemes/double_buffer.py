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

import numpy as np
from numpy.typing import NDArray

from autoplace.planner.placements import Placements
from autoplace.planner.schemes.base import Axes, Scheme, Sides, Span, Timing, combinations
from autoplace.planner.schemes.layout import busy_s, in_sequence, interleaved, overlapped, wait
from autoplace.planner.schemes.remote import (
    LEARNER_WORK,
    learner_keys,
    learners,
    message,
    state_copy,
)
from autoplace.planner.schemes.work import env_step, policy_step

_SAMPLING = [("policy_step", "sampler"), ("env_step", "sampler")]


def _placements(axes: Axes, num_envs: int, steps: int) -> Placements:
    """Every core works for one side only: threads of both, and workers, fit into the CPUs."""
    pairs = itertools.product(learners(axes), axes.sample_threads)
    sides = [Sides("cpu", device, threads, learning) for (device, learning), threads in pairs]
    found = combinations(axes, num_envs, sides, (steps,), policy_lags=(1,))
    return found.where(_sampling_threads(found) + found.learn_threads <= axes.usable_cpus)


def _sampling_threads(placements: Placements) -> NDArray[np.int_]:
    policy, workers = placements.sample_threads, placements.num_workers
    # In several groups policy and workers are at work at once.
    threads: NDArray[np.int_] = np.where(
        placements.num_groups > 1, policy + workers, np.maximum(policy, workers)
    )
    return threads


def _layout(timing: Timing, placements: Placements) -> tuple[Span, ...]:
    keys = learner_keys(timing)
    seconds = overlapped(
        timing, placements, _SAMPLING, keys, sampler_threads=_sampling_threads(placements)
    )
    sampling = interleaved(seconds, [name for name, _ in _SAMPLING], timing.steps)
    learning = in_sequence(seconds, keys, np.zeros(len(placements)))
    sampled_s, learned_s = busy_s(sampling), busy_s(learning)
    answer_s, handoff_s = seconds["handoff", "learner"], timing.seconds["handoff", "sampler"]
    met_s = np.maximum(sampled_s, learned_s + answer_s)
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
    work=(
        policy_step,
        env_step,
        message("sampler", state_copy),
        message("learner"),
        *LEARNER_WORK,
    ),
    layout=_layout,
    policy_lag=1,
)
