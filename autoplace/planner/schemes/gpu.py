"""``gpu``: environments on the CPU, policy and learner on the accelerator."""

from __future__ import annotations

from collections.abc import Iterator

from autoplace.planner.plan import Placement
from autoplace.planner.schemes.base import Axes, Scheme, Sides, Span, Timing, Work, combinations
from autoplace.planner.schemes.layout import busy_s, in_sequence, interleaved, then_learning
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
    sides = [Sides(accelerator, accelerator) for accelerator in axes.accelerators]
    return combinations(axes, num_envs, sides, (steps,))


def _work(workload: Workload, placement: Placement) -> tuple[Work, ...]:
    rows = workload.hyperparameters.rollout_steps * placement.num_envs
    outcomes = copy_task(
        placement.learn_device, "h2d", rollout_bytes_per_row(workload)["outcomes"] * rows
    )
    return (
        per_step("obs_to_device", workload, placement),
        per_step("policy_step", workload, placement),
        per_step("action_to_host", workload, placement),
        env_step(workload, placement),
        Work(
            name="rollout_to_device",
            lane="sampler",
            calls=1,
            parts=((outcomes, 1.0),),
        ),
        gae(workload, placement),
        update(workload, placement),
    )


def _layout(timing: Timing, placement: Placement) -> tuple[Span, ...]:
    seconds, steps = timing.seconds, timing.steps
    sampling = interleaved(
        seconds, ["obs_to_device", "policy_step", "action_to_host", "env_step"], steps
    )
    sampling += in_sequence(seconds, [("rollout_to_device", "sampler")], busy_s(sampling))
    return then_learning(seconds, sampling)


GPU = Scheme(name="gpu", placements=_placements, work=_work, layout=_layout)
