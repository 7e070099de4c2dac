"""Settings that are said to go with a scheme: offered as one option, never chosen unasked.

Under a policy lag an entropy bonus of 0.8 times its weight and a clip range of 0.75 times its own
(0.15 instead of 0.2); minibatches of 1024 or 512 rows on an accelerator and of 2048 on the CPU.
Measured against the defaults (``tests/benchmarks/scheme_settings.py``, 16 seeds, ``double-buffer``
on CartPole-v1 until it returned 400) those under a policy lag took 49.5k env steps instead of
48.4k, at the same speed: they gain nothing there.
"""

from __future__ import annotations

import dataclasses

from autoplace.device_names import CPU
from autoplace.planner.plan import Plan
from autoplace.workload import Hyperparameters, Workload

_ENTROPY_UNDER_LAG, _CLIP_UNDER_LAG = 0.8, 0.75
_CPU_ROWS, _ACCELERATOR_ROWS = (2048,), (1024, 512)


def with_scheme_settings(plan: Plan) -> Workload:
    """The workload of a plan with the settings that are said to go with its scheme.

    A minibatch that was given is kept, and so is one where none of theirs divides the rollout.
    """
    hyper, placement = plan.workload.hyperparameters, plan.placement
    changes: dict[str, float] = {}
    if placement.max_policy_lag:
        changes["entropy_coef"] = _ENTROPY_UNDER_LAG * hyper.entropy_coef
        changes["clip_range"] = _CLIP_UNDER_LAG * hyper.clip_range
    if hyper.minibatch_rows is None:
        rows = _CPU_ROWS if placement.learn_device == CPU else _ACCELERATOR_ROWS
        fitting = [count for count in rows if hyper.rollout_rows % count == 0]
        changes["minibatch_rows"] = fitting[0] if fitting else placement.minibatch_rows
    return dataclasses.replace(
        plan.workload,
        hyperparameters=dataclasses.replace(hyper, **changes),  # type: ignore[arg-type]
    )


def settings_changed(before: Plan, after: Workload) -> tuple[str, ...]:
    """A line for each of the settings that is another than under ``before``."""
    old = dataclasses.replace(
        before.workload.hyperparameters, minibatch_rows=before.placement.minibatch_rows
    )
    new = after.hyperparameters
    return tuple(
        f"{field.name} {getattr(new, field.name):g} instead of {getattr(old, field.name):g}"
        for field in dataclasses.fields(Hyperparameters)
        if getattr(new, field.name) != getattr(old, field.name)
    )
