"""``cpu``: everything on the CPU, one thing at a time."""

from __future__ import annotations

import itertools

from autoplace.planner.placements import Placements
from autoplace.planner.schemes.base import Axes, Scheme, Sides, Span, Timing, combinations
from autoplace.planner.schemes.layout import interleaved, then_learning
from autoplace.planner.schemes.work import env_step, gae, policy_step, update


def _placements(axes: Axes, num_envs: int, steps: int) -> Placements:
    pairs = itertools.product(axes.sample_threads, axes.learn_threads)
    sides = [Sides("cpu", "cpu", *threads) for threads in pairs]
    return combinations(axes, num_envs, sides, (steps,))


def _layout(timing: Timing, placements: Placements) -> tuple[Span, ...]:
    seconds, steps = timing.seconds, timing.steps
    sampling = interleaved(seconds, ["policy_step", "env_step"], steps)
    return then_learning(seconds, sampling)


CPU = Scheme(
    name="cpu",
    placements=_placements,
    work=(policy_step, env_step, gae, update),
    layout=_layout,
)
