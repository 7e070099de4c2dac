"""Work that several schemes share."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

from autoplace.engines import PRECISIONS, engine_on, passes_engine
from autoplace.measurement import Task
from autoplace.planner.plan import Placement
from autoplace.planner.schemes.base import Rule, Work, reads
from autoplace.workload import FLOAT_BYTES, Workload, minibatch_sizes


def env_step_work(workload: Workload, placement: Placement, *, num_envs: int = 0) -> Work:
    """Vector steps of ``num_envs`` environments in one process, or of all as they are placed.

    In several groups each steps by itself.
    """
    calls = workload.hyperparameters.rollout_steps * placement.num_groups
    task = _vector_step(workload, placement, num_envs)
    return Work(name="env_step", lane="sampler", calls=calls, parts=((task, calls),))


def _vector_step(workload: Workload, placement: Placement, num_envs: int) -> Task:
    return Task(
        op="env_step",
        env=workload.env,
        backend=placement.env_backend,
        num_envs=num_envs or math.ceil(placement.num_envs / placement.num_groups),
        workers=0 if num_envs else placement.num_workers,
    )


env_step = reads("num_envs", "num_workers", "num_groups", "env_backend")(env_step_work)


def policy_step_work(workload: Workload, placement: Placement, *, rows: int = 0) -> Work:
    """Policy steps on ``rows`` rows (0: all of the group), each right behind a vector step.

    Where the policy is on an accelerator it is the host that issues them.
    """
    warm = per_step_work("policy_step", workload, placement, rows=rows)
    ((task, calls),) = warm.parts
    step = _vector_step(workload, placement, rows)
    cold = dataclasses.replace(step, op="cold_policy_step", device=task.device, engine=task.engine)
    return dataclasses.replace(warm, parts=((task, calls), (cold, calls)))


def per_step_work(op: str, workload: Workload, placement: Placement, *, rows: int = 0) -> Work:
    """A stage that runs once per vector step and group, on ``rows`` rows (0: all of the group)."""
    calls = workload.hyperparameters.rollout_steps * placement.num_groups
    task = Task(
        op=op,
        device=placement.sample_device,
        threads=placement.sample_threads,
        network=workload.network,
        rows=rows or math.ceil(placement.num_envs / placement.num_groups),
        engine=engine_on(
            placement.engine, placement.sample_device, is_plain=workload.network.is_plain
        ),
        standardized=op == "obs_to_device" or workload.standardizes_observations,
    )
    return Work(name=op, lane="sampler", calls=calls, parts=((task, calls),))


def per_step(op: str) -> Rule:
    """The stage ``op``, which runs once per vector step and group."""

    @reads("num_envs", "num_groups", "sample_device", "sample_threads", "engine")
    def work(workload: Workload, placement: Placement) -> Work:
        return per_step_work(op, workload, placement)

    return work


POLICY_STEP_FIELDS = (
    "num_envs",
    "num_workers",
    "num_groups",
    "env_backend",
    "sample_device",
    "sample_threads",
    "engine",
)
policy_step = reads(*POLICY_STEP_FIELDS)(policy_step_work)


@reads("num_envs", "learn_device", "learn_threads", "engine")
def gae(workload: Workload, placement: Placement) -> Work:
    """A rollout made ready to learn from, and what is drawn and counted once per iteration."""
    hyper = workload.hyperparameters
    books = Task(
        op="bookkeeping",
        shape=(
            hyper.rollout_steps, placement.num_envs, workload.network.action_size, hyper.epochs
        ),
    )  # fmt: skip
    task = Task(
        op="gae",
        device=placement.learn_device,
        threads=placement.learn_threads,
        shape=(hyper.rollout_steps, placement.num_envs),
        network=workload.network,
        engine=passes_engine(
            placement.engine, placement.learn_device, is_plain=workload.network.is_plain
        ),
        standardized=workload.standardizes_observations,
        scaled_rewards=workload.scales_rewards,
    )
    return Work(name="gae", lane="learner", calls=1, parts=((task, 1), (books, 1)))


@reads(
    "num_envs",
    "minibatch_rows",
    "learn_device",
    "learn_threads",
    "engine",
    "precision",
    "accumulation_steps",
)
def update(workload: Workload, placement: Placement) -> Work:
    """Every epoch runs the real sizes: ceil(rows / minibatch) steps, the last one smaller.

    The first step of all meets cold caches, and comes with what is done once. A gradient step that
    accumulates over k backward passes counts as k steps on its parts, which it is but for k - 1
    passes of the optimiser.
    """
    hyper = workload.hyperparameters
    whole = minibatch_sizes(hyper.rollout_steps * placement.num_envs, placement.minibatch_rows)
    passes = placement.accumulation_steps
    counts: dict[int, int] = {}
    for size, times in Counter(whole).items():
        for rows in _part_sizes(size, min(passes, size)):
            counts[rows] = counts.get(rows, 0) + times
    first = Task(
        op="first_update",
        device=placement.learn_device,
        threads=placement.learn_threads,
        network=workload.network,
        rows=max(counts),
        engine=engine_on(
            placement.engine, placement.learn_device, is_plain=workload.network.is_plain
        ),
        dtype=PRECISIONS[placement.precision],
    )
    parts = [(first, 1.0)]
    for rows, count in sorted(counts.items(), reverse=True):
        times = hyper.epochs * count - (rows == first.rows)
        if times:
            parts.append((dataclasses.replace(first, op="update", rows=rows), float(times)))
    return Work(name="update", lane="learner", calls=hyper.epochs * len(whole), parts=tuple(parts))


def _part_sizes(rows: int, count: int) -> list[int]:
    """``rows`` in ``count`` parts of about the same size, the larger ones first."""
    return [rows // count + (index < rows % count) for index in range(count)]


def copy_task(device: str, direction: str, nbytes: int) -> Task:
    """A copy between pinned host memory and ``device``."""
    return Task(op="copy", device=device, direction=direction, pinned=True, shape=(nbytes,))


def rollout_bytes_per_row(workload: Workload) -> dict[str, int]:
    """Bytes of one env step in each tensor of a rollout, by name."""
    return {
        "observations": workload.observation_bytes,
        "actions": workload.action_bytes,
        "outcomes": 3 * FLOAT_BYTES,  # reward, terminated, truncated
    }
