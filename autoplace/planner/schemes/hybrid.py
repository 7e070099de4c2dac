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
from collections.abc import Iterator

from autoplace.measurement import Task
from autoplace.planner.plan import Placement
from autoplace.planner.schemes.base import Axes, Scheme, Sides, Span, Timing, Work, combinations
from autoplace.planner.schemes.layout import busy_s, in_sequence, interleaved, wait
from autoplace.planner.schemes.work import (
    copy_task,
    env_step,
    gae,
    per_step,
    rollout_bytes_per_row,
    update,
)
from autoplace.workload import Workload


def _placements(axes: Axes, num_envs: int, steps: int) -> Iterator[Placement]:
    pairs = itertools.product(axes.accelerators, axes.sample_threads)
    sides = [Sides("cpu", accelerator, threads) for accelerator, threads in pairs]
    return combinations(axes, num_envs, sides, axes.transfer_intervals)


def _work(workload: Workload, placement: Placement) -> tuple[Work, ...]:
    steps = workload.hyperparameters.rollout_steps
    interval = placement.transfer_interval_steps
    device = placement.learn_device
    chunks = math.ceil(steps / interval)
    full, rest = divmod(steps, interval)
    row_bytes = rollout_bytes_per_row(workload)
    copies: dict[Task, float] = {}
    for length, count in ((interval, full), (rest, 1 if rest else 0)):
        for nbytes in row_bytes.values():
            if count:
                task = copy_task(device, "h2d", nbytes * length * placement.num_envs)
                copies[task] = copies.get(task, 0.0) + count
    issue = Task(op="dispatch", device=device)
    weights = Task(
        op="weights_to_host",
        device=device,
        network=workload.network,
    )
    return (
        per_step("policy_step", workload, placement),
        env_step(workload, placement),
        Work(
            name="rollout_to_device",
            lane="sampler",
            calls=chunks,
            parts=((issue, float(chunks * len(row_bytes))),),
        ),
        Work(
            name="rollout_to_device",
            lane="copy",
            calls=chunks,
            parts=tuple(copies.items()),
        ),
        gae(workload, placement),
        update(workload, placement),
        Work(name="weights_to_host", lane="learner", calls=1, parts=((weights, 1.0),)),
    )


def last_chunk_delay(sampling_s: float, copy_s: float, steps: int, interval: int) -> float:
    """Seconds from the end of sampling until the last chunk has arrived.

    Chunk k of K can leave when it has been sampled, after k I / T of S, and when the link has
    finished the chunk before it. With equal chunks that is c where the link keeps up with sampling
    (c <= S / K); where it does not, the link never rests after the first chunk.
    """
    lengths = [interval] * (steps // interval) + ([steps % interval] if steps % interval else [])
    if len(lengths) > 2 and lengths[0] == lengths[-1]:
        # Equal chunks: the link is free at the end of sampling, or it never rests.
        chunk_s, each_s = copy_s / len(lengths), sampling_s / len(lengths)
        return max(chunk_s, each_s + copy_s - sampling_s)
    sampled_steps, free_s = 0, 0.0
    for length in lengths:
        sampled_steps += length
        free_s = max(free_s, sampling_s * sampled_steps / steps) + copy_s * length / steps
    return free_s - sampling_s


def _layout(timing: Timing, placement: Placement) -> tuple[Span, ...]:
    seconds, steps = timing.seconds, timing.steps
    interval = placement.transfer_interval_steps
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
    first_chunk_s = sampled_s * min(interval, steps) / steps
    copying = Span(name="rollout_to_device", lane="copy", start_s=first_chunk_s, total_s=copy_s)
    return (
        *sampling,
        *wait("sampler", sampled_s, end_s - sampled_s),
        *wait("learner", 0.0, arrived_s),
        *learning,
        *wait("copy", 0.0, end_s - copy_s),
        copying,
    )


HYBRID = Scheme(name="hybrid", placements=_placements, work=_work, layout=_layout)
