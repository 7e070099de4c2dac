"""``double-buffer``: one rollout is sampled on the CPU while the other is learned from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from autoplace.measurement import Task
from autoplace.planner.plan import Placement
from autoplace.planner.schemes.base import Axes, Key, Scheme, Sides, Span, Work, combinations
from autoplace.planner.schemes.layout import busy_s, in_sequence, interleaved, wait
from autoplace.planner.schemes.work import (
    copy_task,
    env_step,
    gae,
    per_step,
    rollout_bytes_per_row,
    update,
)
from autoplace.workload import FLOAT_BYTES, Workload


def _placements(axes: Axes, num_envs: int, steps: int) -> Iterator[Placement]:
    """Every core works for one side only: threads of both, and workers, fit into the CPUs."""
    learners = [("cpu", threads) for threads in axes.learn_threads]
    learners += [(accelerator, 1) for accelerator in axes.accelerators]
    pairs = itertools.product(learners, axes.sample_threads)
    sides = [Sides("cpu", device, threads, learning) for (device, learning), threads in pairs]
    for placement in combinations(axes, num_envs, sides, (steps,)):
        sampling = max(placement.sample_threads, placement.num_workers)
        if sampling + placement.learn_threads <= axes.usable_cpus:
            yield placement


def _work(workload: Workload, placement: Placement) -> tuple[Work, ...]:
    hyper = workload.hyperparameters
    rows = hyper.rollout_steps * placement.num_envs
    # Weights and both moments of Adam are taken over, the order of minibatches is handed over.
    numbers = 3 * workload.network.num_parameters + 2 * hyper.epochs * rows
    copied = Task(op="elementwise", threads=placement.sample_threads, shape=(numbers,))
    handoff = Work(
        name="handoff",
        lane="sampler",
        calls=1,
        parts=((Task(op="handoff"), 1.0), (copied, 1.0)),
    )
    works = [
        per_step("policy_step", workload, placement),
        env_step(workload, placement),
        handoff,
        gae(workload, placement),
        update(workload, placement),
    ]
    device = placement.learn_device
    if device != "cpu":
        copies = tuple(
            (copy_task(device, "h2d", nbytes * rows), 1.0)
            for nbytes in (*rollout_bytes_per_row(workload).values(), 8 * hyper.epochs)
        )
        state = FLOAT_BYTES * 3 * workload.network.num_parameters
        works += [
            Work(name="rollout_to_device", lane="learner", calls=1, parts=copies),
            Work(
                name="weights_to_host",
                lane="learner",
                calls=1,
                parts=((copy_task(device, "d2h", state), 1.0),),
            ),
        ]
    return tuple(works)


def _layout(seconds: Mapping[Key, float], placement: Placement, steps: int) -> tuple[Span, ...]:
    """Both sides start together, the faster one waits, and then they hand over."""
    sampling = interleaved(seconds, ["policy_step", "env_step"], steps)
    order = ("rollout_to_device", "gae", "update", "weights_to_host")
    keys = [(name, "learner") for name in order if (name, "learner") in seconds]
    learning = in_sequence(seconds, keys, 0.0)
    sampled_s, learned_s = busy_s(sampling), busy_s(learning)
    met_s, handoff_s = max(sampled_s, learned_s), seconds["handoff", "sampler"]
    return (
        *sampling,
        *wait("sampler", sampled_s, met_s - sampled_s),
        Span(name="handoff", lane="sampler", start_s=met_s, total_s=handoff_s),
        *learning,
        *wait("learner", learned_s, met_s + handoff_s - learned_s),
    )


DOUBLE_BUFFER = Scheme(
    name="double-buffer", placements=_placements, work=_work, layout=_layout, policy_lag=1
)
