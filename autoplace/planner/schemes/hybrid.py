"""``hybrid``: sampling on the CPU, learning on an accelerator.

==========  ========================================================================================
symbol      meaning
==========  ========================================================================================
K, I        chunks that a rollout is copied in, vector steps per chunk (the last may be shorter)
T           vector steps in a rollout
S           seconds of sampling on the sampler's lane
c           seconds that the link needs for one chunk
==========  ========================================================================================
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

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
from autoplace.planner.schemes.layout import busy_s, in_sequence, interleaved, wait
from autoplace.planner.schemes.work import (
    copy_task,
    env_step,
    gae,
    policy_step,
    rollout_bytes_per_row,
    update,
)
from autoplace.workload import Workload


def _placements(axes: Axes, num_envs: int, steps: int) -> Placements:
    pairs = itertools.product(axes.accelerators, axes.sample_threads)
    sides = [Sides("cpu", accelerator, threads) for accelerator, threads in pairs]
    return combinations(axes, num_envs, sides, axes.transfer_intervals)


def _chunks(workload: Workload, placement: Placement) -> int:
    return math.ceil(workload.hyperparameters.rollout_steps / placement.transfer_interval_steps)


@reads("learn_device", "transfer_interval_steps")
def _issue(workload: Workload, placement: Placement) -> Work:
    """The sampler starts the copies of a chunk and goes on."""
    chunks, tensors = _chunks(workload, placement), len(rollout_bytes_per_row(workload))
    issue = Task(op="dispatch", device=placement.learn_device)
    return Work(
        name="rollout_to_device",
        lane="sampler",
        calls=chunks,
        parts=((issue, float(chunks * tensors)),),
    )


@reads("learn_device", "transfer_interval_steps", "num_envs")
def _copies(workload: Workload, placement: Placement) -> Work:
    interval = placement.transfer_interval_steps
    full, rest = divmod(workload.hyperparameters.rollout_steps, interval)
    copies: dict[Task, float] = {}
    for length, count in ((interval, full), (rest, 1 if rest else 0)):
        for nbytes in rollout_bytes_per_row(workload).values():
            if count:
                nbytes_of_all = nbytes * length * placement.num_envs
                task = copy_task(placement.learn_device, "h2d", nbytes_of_all)
                copies[task] = copies.get(task, 0.0) + count
    return Work(
        name="rollout_to_device",
        lane="copy",
        calls=_chunks(workload, placement),
        parts=tuple(copies.items()),
    )


@reads("learn_device")
def _weights(workload: Workload, placement: Placement) -> Work:
    task = Task(op="weights_to_host", device=placement.learn_device, network=workload.network)
    return Work(name="weights_to_host", lane="learner", calls=1, parts=((task, 1.0),))


def last_chunk_delay(
    sampling_s: Array, copy_s: Array, steps: NDArray[np.int_], interval: NDArray[np.int_]
) -> Array:
    """Seconds from the end of sampling until the last chunk has arrived.

    Chunk k can leave when it has been sampled, after k I / T of S, and when the link has finished
    the chunk before it. With K chunks of the same length that is c after sampling where the link
    keeps up with it; where it does not, the link never rests after the first chunk. A shorter
    chunk at the end leaves when both sampling and the link are through.
    """
    full, rest = np.divmod(steps, interval)
    chunk_s, each_s = copy_s * interval / steps, sampling_s * interval / steps
    free_s = np.maximum(full * each_s + chunk_s, each_s + full * chunk_s)
    with_rest_s = np.maximum(free_s, sampling_s) + copy_s * rest / steps
    return np.where(rest > 0, with_rest_s, free_s) - sampling_s


def _layout(timing: Timing, placements: Placements) -> tuple[Span, ...]:
    seconds, steps = timing.seconds, timing.steps
    interval = placements.transfer_interval_steps
    sampling = interleaved(seconds, ["policy_step", "env_step", "rollout_to_device"], steps)
    sampled_s = busy_s(sampling)
    copy_s = seconds["rollout_to_device", "copy"]
    arrived_s = sampled_s + last_chunk_delay(sampled_s, copy_s, steps, interval)
    learning = in_sequence(
        seconds,
        [("gae", "learner"), ("update", "learner"), ("weights_to_host", "learner")],
        arrived_s,
    )
    end_s = arrived_s + busy_s(learning)
    first_chunk_s = sampled_s * interval / steps
    copying = Span(name="rollout_to_device", lane="copy", start_s=first_chunk_s, total_s=copy_s)
    return (
        *sampling,
        *wait("sampler", sampled_s, end_s - sampled_s),
        *wait("learner", 0 * arrived_s, arrived_s),
        *learning,
        *wait("copy", 0 * end_s, end_s - copy_s),
        copying,
    )


HYBRID = Scheme(
    name="hybrid",
    placements=_placements,
    work=(policy_step, env_step, _issue, _copies, gae, update, _weights),
    layout=_layout,
)
