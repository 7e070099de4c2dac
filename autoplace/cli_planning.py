"""From what the command line was told to a plan; shared by the commands that need one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoplace.cli_options import HYPERPARAMETERS, SWITCHES
from autoplace.cli_output import calibration_progress, note
from autoplace.errors import UsageError

if TYPE_CHECKING:
    from autoplace.cost_model import CostModel
    from autoplace.measurement import Calibration
    from autoplace.planner.memory import Limits
    from autoplace.planner.plan import Plan
    from autoplace.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan and what it was made from."""

    plan: Plan
    calibration: Calibration
    model: CostModel


def _workload(env: str, env_kwargs: str | None, options: Mapping[str, Any]) -> Workload:
    """The workload that the options describe: preset first, single flags on top."""
    from autoplace.envs import describe
    from autoplace.workload import EnvSpec

    values: dict[str, Any] = {}
    if options["preset"] is not None:
        from autoplace.presets import preset_hyperparameters

        values.update(preset_hyperparameters(options["preset"], env))
    for name in [name for name, _, _ in HYPERPARAMETERS] + [name for name, _ in SWITCHES]:
        if options[name] is not None:
            values[name] = options[name]
    spec = EnvSpec.make(
        env,
        _parse_kwargs(env_kwargs),
        wrappers=options["wrappers"],
        images=options["images"],
    )
    return describe(spec, **values)


def _parse_kwargs(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        kwargs = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"--env-kwargs is a JSON object, got {text!r} ({error.msg}): "
            "use for example '{\"gravity\": 9.8}'"
        ) from error
    if not isinstance(kwargs, dict):
        raise UsageError(f"--env-kwargs is a JSON object, got {text!r}: put it in braces")
    return kwargs


def _given_placement(options: Mapping[str, Any]) -> dict[str, object]:
    given: dict[str, object] = {
        "transfer_interval_steps": options["transfer_interval"],
        "sample_threads": options["sample_threads"],
        "learn_threads": options["learn_threads"],
        "num_workers": options["num_workers"],
    }
    if options["device"] not in (None, "auto"):
        given["device"] = options["device"]
    if options["env_backend"] not in (None, "auto"):
        given["env_backend"] = options["env_backend"]
    return {name: value for name, value in given.items() if value is not None}


def planned(env: str, env_kwargs: str | None, options: Mapping[str, Any]) -> Planned:
    """The plan that the options describe; measures what is missing, and says so on stderr."""
    from autoplace.cost_model import fit_cost_model
    from autoplace.planner.search import make_plan
    from autoplace.prepare import prepare_calibration

    workload = _workload(env, env_kwargs, options)
    with calibration_progress() as progress:
        prepared = prepare_calibration(
            workload,
            path=options["calibration"],
            env_step_s=options.get("env_step_time"),
            progress=progress,
            note=note,
        )
    calibration = prepared.calibration
    model = fit_cost_model(calibration)
    plan = make_plan(
        calibration,
        workload,
        scheme=options["scheme"],
        max_policy_lag=options["max_policy_lag"],
        placement=_given_placement(options),
        limits=_limits(calibration, is_here=options["calibration"] is None),
        model=model,
    )
    return Planned(plan=plan, calibration=calibration, model=model)


def _limits(calibration: Calibration, *, is_here: bool) -> Limits:
    """Memory that may be used: free now if it is this machine, all of it if it is another."""
    import psutil

    from autoplace.planner.memory import Limits

    machine = calibration.machine
    host_bytes = machine.memory_bytes
    if is_here:
        host_bytes = min(host_bytes, psutil.virtual_memory().available)
    known = [a.memory_bytes for a in machine.accelerators if a.usable and a.memory_bytes]
    return Limits(host_bytes=host_bytes, device_bytes=min(known) if known else None)
