"""``gpu``: environments on the CPU, policy and learner on the accelerator."""

from __future__ import annotations

from autoplace.planner.placements import Placements
from autoplace.planner.plan import Placement
from autoplace.planner.schemes.base import (
    Axes,
    Scheme,
    Sides,
    Span,
    Timing,
    Work,
    combinations,
    reads,
)
from autoplace.planner.schemes.layout import busy_s, in_sequence, interleaved, then_learning
from autoplace.planner.schemes.work import (
    copy_task,
    env_step,
    gae,
    per_step,
    policy_step,
    rollout_bytes_per_row,
    update,
)
from autoplace.workload import Workload


def _placements(axes: Axes, num_envs: int, steps: int) -> Placements:
    sides = [Sides(accelerator, accelerator) for accelerator in axes.accelerators]
    return combinations(axes, num_envs, sides, (steps,))


@reads("learn_device", "num_envs")
def _outcomes(workload: Workload, placement: Placement) -> Work:
    """Rewards and flags follow once a rollout."""
    rows = workload.hyperparameters.rollout_steps * placement.num_envs
    nbytes = rollout_bytes_per_row(workload)["outcomes"] * rows
    copy = copy_task(placement.learn_device, "h2d", nbytes)
    return Work(name="rollout_to_device", lane="sampler", calls=1, parts=((copy, 1.0),))


def _layout(timing: Timing, placements: Placements) -> tuple[Span, ...]:
    seconds, steps = timing.seconds, timing.steps
    sampling = interleaved(
        seconds, ["obs_to_device", "policy_step", "action_to_host", "env_step"], steps
    )
    sampling += in_sequence(seconds, [("rollout_to_device", "sampler")], busy_s(sampling))
    return then_learning(seconds, sampling)


GPU = Scheme(
    name="gpu",
    placements=_placements,
    work=(
        per_step("obs_to_device"),
        policy_step,
        per_step("action_to_host"),
        env_step,
        _outcomes,
        gae,
        update,
    ),
    layout=_layout,
)
