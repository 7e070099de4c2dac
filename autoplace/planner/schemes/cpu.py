"""``cpu``: everything on the CPU, one thing at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from autoplace.planner.plan import Placement
from autoplace.planner.schemes.base import Axes, Scheme, Sides, Span, Timing, Work, combinations
from autoplace.planner.schemes.layout import interleaved, then_learning
from autoplace.planner.schemes.work import env_step, gae, per_step, update
from autoplace.workload import Workload


def _placements(axes: Axes, num_envs: int, steps: int) -> Iterator[Placement]:
    pairs = itertools.product(axes.sample_threads, axes.learn_threads)
    sides = [Sides("cpu", "cpu", *threads) for threads in pairs]
    return combinations(axes, num_envs, sides, (steps,))


def _work(workload: Workload, placement: Placement) -> tuple[Work, ...]:
    return (
        per_step("policy_step", workload, placement),
        env_step(workload, placement),
        gae(workload, placement),
        update(workload, placement),
    )


def _layout(timing: Timing, placement: Placement) -> tuple[Span, ...]:
    seconds, steps = timing.seconds, timing.steps
    sampling = interleaved(seconds, ["policy_step", "env_step"], steps)
    return then_learning(seconds, sampling)


CPU = Scheme(name="cpu", placements=_placements, work=_work, layout=_layout)
