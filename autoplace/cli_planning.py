"""From what the command line was told to a plan; shared by the commands that need one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoplace.cli_options import HYPERPARAMETERS, SWITCHES
from autoplace.cli_output import calibration_progress, note, race_progress
from autoplace.errors import AutoplaceError, UsageError
from autoplace.importing import load

if TYPE_CHECKING:
    from autoplace.cost_model import CostModel
    from autoplace.measurement import Calibration
    from autoplace.planner.memory import Limits
    from autoplace.planner.observed import Replan
    from autoplace.planner.plan import Plan
    from autoplace.workload import EnvSpec, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan and what it was made from."""

    plan: Plan
    calibration: Calibration
    model: CostModel


def _workload(env: str, env_kwargs: str | None, options: Mapping[str, Any]) -> Workload:
    """The workload that the options describe: preset first, single flags on top."""
    from autoplace.envs import describe

    return describe(_env_spec(env, env_kwargs, options), **_given_hyperparameters(env, options))


def _env_spec(env: str, env_kwargs: str | None, options: Mapping[str, Any]) -> EnvSpec:
    from autoplace.workload import EnvSpec

    names = ("wrappers", "images", "replace_non_finite")
    return EnvSpec.make(env, _parse_kwargs(env_kwargs), **{name: options[name] for name in names})


def _given_hyperparameters(env: str, options: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if options["preset"] is not None:
        from autoplace.presets import preset_hyperparameters

        values.update(preset_hyperparameters(options["preset"], env))
    for name in [name for name, _, _ in HYPERPARAMETERS] + [name for name, _ in SWITCHES]:
        if options[name] is not None:
            values[name] = options[name]
    return values


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
        "num_groups": options["num_groups"],
        "precision": options["precision"],
        "accumulation_steps": options["accumulation_steps"],
    }
    if options["device"] not in (None, "auto"):
        given["device"] = options["device"]
    if options["engine"] != "auto":
        given["engine"] = options["engine"]
    if options["env_backend"] not in (None, "auto"):
        given["env_backend"] = options["env_backend"]
    return {name: value for name, value in given.items() if value is not None}


def planned(
    env: str, env_kwargs: str | None, options: Mapping[str, Any], total_steps: int | None
) -> Planned:
    """The plan that the options describe; measures what is missing, and says so on stderr.

    ``total_steps`` is the run's length, ``None`` where that is of no account. An engine that takes
    more once than it saves over it is dropped, though it was asked for.
    """
    load("autoplace.prepare")
    load("autoplace.cost_model")
    workload, lag = _workload(env, env_kwargs, options), options["max_policy_lag"]
    made = _plan_workload(workload, options, lag, total_steps)
    return _with_settings(made, options, lag, total_steps) if options["scheme_settings"] else made


def _with_settings(
    made: Planned, options: Mapping[str, Any], max_policy_lag: int, total_steps: int | None
) -> Planned:
    """The same scheme on the same device, with the settings that are said to go with it."""
    from autoplace.planner.scheme_settings import settings_changed, with_scheme_settings

    plan = made.plan
    workload = with_scheme_settings(plan)
    there = {**options, "scheme": plan.scheme, "device": plan.placement.device}
    again = _plan_workload(workload, there, max_policy_lag, total_steps)
    changes = (*again.plan.changes_learning, *settings_changed(plan, workload))
    return dataclasses.replace(
        again, plan=dataclasses.replace(again.plan, changes_learning=changes)
    )


def _plan_workload(
    workload: Workload, options: Mapping[str, Any], max_policy_lag: int, total_steps: int | None
) -> Planned:
    from autoplace.cost_model import fit_cost_model
    from autoplace.engines import TIMED_WHERE_NAMED
    from autoplace.kept_model import cost_model_of
    from autoplace.planner.engine_gain import why_it_costs_more, without_engine
    from autoplace.planner.search import make_plan
    from autoplace.prepare import prepare_calibration

    with calibration_progress() as progress:
        prepared = prepare_calibration(
            workload,
            path=options["calibration"],
            env_step_s=options.get("env_step_time"),
            env_backend=None if options["env_backend"] == "auto" else options["env_backend"],
            engine=options["engine"],
            progress=progress,
            note=note,
        )
    calibration = prepared.calibration
    given = _given_placement(options)
    if not prepared.engine_works:
        given.pop("engine")

    def plan_with(
        calibration: Calibration, model: CostModel, given: Mapping[str, object]
    ) -> Planned:
        plan = make_plan(
            calibration,
            workload,
            scheme=options["scheme"],
            max_policy_lag=max_policy_lag,
            placement=given,
            limits=_limits(calibration, is_here=options["calibration"] is None),
            model=model,
            total_steps=total_steps,
        )
        return Planned(plan=plan, calibration=calibration, model=model)

    made = plan_with(calibration, cost_model_of(calibration), given)
    engine = made.plan.placement.engine
    if engine not in TIMED_WHERE_NAMED or "engine" not in given:
        return made
    others = {name: value for name, value in given.items() if name != "engine"}
    without = without_engine(calibration, engine)
    instead = plan_with(without, fit_cost_model(without), others)
    reason = why_it_costs_more(made.plan.chosen, instead.plan.chosen)
    if reason is None:
        return made
    note(reason)
    return instead


def plan_to_resume(
    saved: Plan,
    env: str,
    env_kwargs: str | None,
    options: Mapping[str, Any],
    steps_left: Callable[[], int],
) -> Plan:
    """The plan that a run goes on with: its own, or a new one that learns the same.

    It is planned again on another machine and where the options ask for something else. What bears
    on learning (minibatch, policy lag) stays as it was, unless it is given.

    Args:
        saved: the plan that the run followed.
        env: ENV of the command line.
        env_kwargs: likewise.
        options: likewise; ``max_policy_lag`` is ``None`` where it was not given.
        steps_left: env steps that are left to run.

    Raises:
        UsageError: another environment is named.
    """
    workload = saved.workload
    named = _env_spec(env, env_kwargs, options)
    if named.id != workload.env.id or (env_kwargs is not None and named != workload.env):
        raise UsageError(
            f"the run is on {workload.env.id} {workload.env.kwargs_json}, got {env} "
            f"{named.kwargs_json}: name the same environment"
        )
    if named.replace_non_finite:
        replacing = dataclasses.replace(workload.env, replace_non_finite=True)
        workload = dataclasses.replace(workload, env=replacing)
        saved = dataclasses.replace(saved, workload=workload)
    hyper = dataclasses.replace(workload.hyperparameters, **_given_hyperparameters(env, options))
    given, lag = _given_placement(options), saved.placement.max_policy_lag
    is_as_asked = options["scheme"] in ("auto", saved.scheme) and all(
        getattr(saved.placement, name) == value for name, value in given.items()
    )
    if options["max_policy_lag"] is not None:
        is_as_asked = is_as_asked and lag <= options["max_policy_lag"]
        lag = options["max_policy_lag"]
    elif options["scheme"] != "auto":
        lag = max(lag, 1)  # the scheme's own, where it has one
    if not is_as_asked:
        why = "the options ask for another placement"
    elif hyper != workload.hyperparameters:
        why = "the options give other hyperparameters"
    elif not _is_of(saved, calibration_of(saved, options)):
        why = "this is not the machine that the run was planned for"
    else:
        return saved
    if hyper.minibatch_rows is None:
        hyper = dataclasses.replace(hyper, minibatch_rows=saved.placement.minibatch_rows)
    note(f"planning again: {why}")
    workload = dataclasses.replace(workload, hyperparameters=hyper)
    return _plan_workload(workload, options, lag, max(1, steps_left())).plan


def calibration_of(plan: Plan, options: Mapping[str, Any]) -> Calibration | None:
    """The calibration that a plan was made from, ``None`` where this machine has it no more."""
    from autoplace import store
    from autoplace.machine import detect_machine

    if options["calibration"] is not None:
        return store.read_calibration(options["calibration"])
    calibration, _ = store.stored_calibration(detect_machine(accelerators=False))
    return calibration if _is_of(plan, calibration) else None


def _is_of(plan: Plan, calibration: Calibration | None) -> bool:
    return calibration is not None and calibration.machine.fingerprint == plan.fingerprint


def replanner(calibration: Calibration | None, options: Mapping[str, Any]) -> Replan:
    """What plans a run again, around what the options give.

    Raises:
        UsageError: there is no calibration to plan with.
    """
    from autoplace.kept_model import cost_model_of
    from autoplace.planner.observed import make_replanner

    if calibration is None:
        raise UsageError(
            "--replan plans with the calibration that the plan was made from, and this machine has "
            "it no more: leave --replan out, or run `autoplace calibrate` and plan anew"
        )
    return make_replanner(
        calibration,
        cost_model_of(calibration),
        scheme=options["scheme"],
        max_policy_lag=options["max_policy_lag"],
        placement=_given_placement(options),
        limits=_limits(calibration, is_here=options["calibration"] is None),
    )


def _limits(calibration: Calibration, *, is_here: bool) -> Limits:
    """Memory that may be used: free now if it is this machine, all of it if it is another."""
    from autoplace.envs.memory_watch import usable_memory
    from autoplace.planner.memory import Limits

    machine = calibration.machine
    host_bytes = machine.memory_bytes
    if is_here:
        host_bytes = min(host_bytes, usable_memory()[1])
    known = [a.memory_bytes for a in machine.accelerators if a.usable and a.memory_bytes]
    return Limits(host_bytes=host_bytes, device_bytes=min(known) if known else None)


def settled(plan: Plan, may_race: Callable[[], bool]) -> Plan:
    """The plan with a close call decided by measurement; any other as it is.

    An earlier race decides where there was one; else one is run if that is allowed.
    """
    from autoplace import close_calls
    from autoplace.machine import detect_machine

    if not plan.rivals:
        return plan
    machine = detect_machine(accelerators=False)
    verdict = close_calls.kept_verdict(plan, machine)
    if verdict is None:
        if not may_race():
            return plan
        note(f"the prediction is a tie: racing {' and '.join(close_calls.names(plan.rivals))}")
        with race_progress() as progress:
            verdict = close_calls.run_race(plan, progress)
        try:
            close_calls.keep_verdict(plan, machine, verdict)
        except AutoplaceError as fault:  # the run goes on without
            note(f"not kept: {fault}")
    return close_calls.decide(plan, verdict)
