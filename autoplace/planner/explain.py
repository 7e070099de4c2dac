"""A plan in words. Every number is read off the plan; none is computed anew."""

from __future__ import annotations

import textwrap

from autoplace.engines import TIMED_WHERE_NAMED
from autoplace.planner.plan import LANES, Candidate, Flip, Placement, Plan, Stage
from autoplace.units import format_percent, format_rate, format_seconds
from autoplace.workload import NetworkSpec

_SHOWN_CANDIDATES = 6
_WORTH_SAYING = 0.01  # share of a run that its start takes


def explain_plan(plan: Plan, *, every_candidate: bool = False, brief: bool = False) -> str:
    """The whole explanation, or in brief what is done and how clear the choice was."""
    if brief:
        return f"{_headline(plan)}\n{_placement(plan.placement)}\n{_verdict(plan)}\n"
    parts = [
        _headline(plan),
        _placement(plan.placement),
        _stage_table(plan.chosen),
        _assumes(plan),
        _verdict(plan),
        _candidates(plan, every_candidate),
        _flips(plan),
    ]
    if plan.changes_learning:
        parts.append("Changes what is learned:\n" + _bullets(plan.changes_learning))
    return "\n\n".join(part for part in parts if part)


def describe_placement(placement: Placement) -> str:
    """A placement on one line, as short as it can be told from others."""
    text = f"minibatch {placement.minibatch_rows}, {_backend(placement)} envs"
    sampling = _threads(placement.sample_device, placement.sample_threads)
    learning = _threads(placement.learn_device, placement.learn_threads)
    text += f", sampling on {sampling}, learning on {learning}"
    if placement.sample_device != placement.learn_device:
        text += f", chunks of {placement.transfer_interval_steps} steps"
    return f"{text}, {placement.engine} engine"


def describe_network(network: NetworkSpec) -> str:
    """A network in a few words."""
    if network.factory:
        return f"network {network.factory} ({network.num_parameters:,} parameters)"
    hidden = f"hidden {','.join(map(str, network.hidden_sizes)) or 'none'}"
    encoders = dict.fromkeys(image.encoder for image in network.images)
    return f"{' and '.join(encoders)} shared, {hidden}" if encoders else hidden


def _threads(device: str, count: int) -> str:
    if device != "cpu":
        return device
    return f"{count} CPU thread" + ("s" if count != 1 else "")


def _headline(plan: Plan) -> str:
    workload = plan.workload
    hyper = workload.hyperparameters
    network = describe_network(workload.network)
    chosen = plan.chosen
    modelled = " (a modelled machine)" if plan.origin == "modelled" else ""
    return (
        f"{workload.env.id}: scheme {chosen.scheme}{modelled}, about "
        f"{format_rate(chosen.env_steps_per_s)} env steps/s\n"
        f"{hyper.num_envs} envs x {hyper.rollout_steps} steps = {hyper.rollout_rows:,} rows an "
        f"iteration, {hyper.epochs} epochs, {network}; one iteration takes "
        f"{format_seconds(chosen.iteration_s)} "
        f"({format_seconds(chosen.low_s)} to {format_seconds(chosen.high_s)})"
    )


def _placement(placement: Placement) -> str:
    return f"Placement: {describe_placement(placement)}"


def _stage_table(candidate: Candidate) -> str:
    """Where the time goes, lane by lane; each lane adds up to the iteration."""
    lines = [
        f"{'lane':<9}{'stage':<20}{'calls':>7}{'time':>11}{'share':>8}"
        f"   {'90 % interval':<24}source"
    ]
    for lane in LANES:
        stages = [stage for stage in candidate.stages if stage.lane == lane]
        for index, stage in enumerate(sorted(stages, key=lambda s: s.start_s)):
            lines.append(_stage_line(stage, candidate.iteration_s, first=index == 0))
    return "\n".join(lines)


def _stage_line(stage: Stage, iteration_s: float, *, first: bool) -> str:
    interval = (
        f"{format_seconds(stage.low_s)} to {format_seconds(stage.high_s)}"
        if stage.source != "derived"
        else ""
    )
    calls = f"{stage.calls:,}" if stage.source != "derived" else ""
    return (
        f"{stage.lane if first else '':<9}{stage.name:<20}{calls:>7}"
        f"{format_seconds(stage.total_s):>11}{format_percent(stage.total_s / iteration_s):>8}"
        f"   {interval:<24}{stage.source}"
    )


def _assumes(plan: Plan) -> str:
    return textwrap.fill(f"Assumed: {'; '.join(plan.assumes)}.", 100) if plan.assumes else ""


def _verdict(plan: Plan) -> str:
    busy_s = max(s.total_s for s in plan.chosen.stages if s.name == plan.bottleneck)
    text = (
        f"Bottleneck: {plan.bottleneck}, "
        f"{format_percent(busy_s / plan.chosen.iteration_s)} of the iteration."
    )
    if plan.runner_up is None:
        return text
    runner = plan.runner_up
    what = f"scheme {runner.scheme}" if runner.scheme != plan.scheme else f"{runner.scheme} again"
    judgement = (
        "a tie: the margin is inside the model's error"
        if plan.is_close
        else "more than the model's error"
    )
    starts = [line for line in (_start(plan.chosen), _start(runner)) if line]
    return "\n".join(
        [
            text,
            f"Runner-up: {what}, {format_rate(runner.env_steps_per_s)} env steps/s:",
            f"  {describe_placement(runner.placement)}.",
            *starts,
            f"Margin: {format_percent(plan.margin_fraction)}, {judgement}.",
            *([f"It was {plan.raced}."] if plan.raced else []),
        ]
    )


def _start(candidate: Candidate) -> str:
    """What a run pays for its processes, where that is worth saying."""
    share = candidate.start_share
    if share < _WORTH_SAYING:
        return ""
    what = f"Starting the processes of {candidate.scheme}"
    if candidate.placement.engine in TIMED_WHERE_NAMED:
        what = f"Making {candidate.scheme} with the {candidate.placement.engine} engine ready"
    rate = format_rate(candidate.env_steps_per_s / (1 + share))
    return (
        f"{what} takes {format_seconds(candidate.one_off_s)}: "
        f"a run of {candidate.total_steps:,} steps makes {rate} env steps/s."
    )


def _candidates(plan: Plan, every: bool) -> str:
    shown = plan.candidates if every else _leading(plan)
    starts = any(c.start_share >= _WORTH_SAYING for c in shown)
    start = f"{'- start':>9}" if starts else ""
    lines = [
        f"{'scheme':<15}{'env steps/s':>11}{start}{'x efficiency':>14}{'=':>9}{'minibatch':>11}"
        f"   {'sampling':<11}{'learning':<11}{'chunk':>6}   {'engine':<8}envs"
    ]
    for candidate in shown:
        if candidate.rejected_because is not None:
            lines.append(f"{candidate.scheme:<15}{'-':>11}   {candidate.rejected_because}")
            continue
        placement = candidate.placement
        chunked = placement.sample_device != placement.learn_device
        chunk = str(placement.transfer_interval_steps) if chunked else "-"
        sampling = _side(placement.sample_device, placement.sample_threads)
        learning = _side(placement.learn_device, placement.learn_threads)
        share = candidate.start_share
        start = f"{format_percent(share / (1 + share)):>9}" if starts else ""
        lines.append(
            f"{candidate.scheme:<15}{format_rate(candidate.env_steps_per_s):>11}{start}"
            f"{candidate.sample_efficiency:>14.2f}{format_rate(candidate.score):>9}"
            f"{placement.minibatch_rows:>11}"
            f"   {sampling:<11}{learning:<11}{chunk:>6}   {placement.engine:<8}"
            f"{_backend(placement)}"
        )
    hidden = len(plan.candidates) - len(shown)
    if hidden:
        lines.append(f"... and {hidden} more (--all shows them)")
    return "\n".join(lines)


def _backend(placement: Placement) -> str:
    workers = f" x {placement.num_workers}" if placement.num_workers else ""
    groups = f" in {placement.num_groups} groups" if placement.num_groups > 1 else ""
    return f"{placement.env_backend}{workers}{groups}"


def _side(device: str, threads: int) -> str:
    return f"cpu x {threads}" if device == "cpu" else device


def _leading(plan: Plan) -> tuple[Candidate, ...]:
    """The first few that were costed, and every distinct reason for a rejection."""
    rejected = plan.rejected
    num_costed = len(plan.candidates) - len(rejected)
    costed = plan.candidates[: min(_SHOWN_CANDIDATES, num_costed)]
    reasons: dict[tuple[str, str], Candidate] = {}
    for candidate in rejected:
        reasons.setdefault((candidate.scheme, str(candidate.rejected_because)), candidate)
    return (*costed, *list(reasons.values())[:_SHOWN_CANDIDATES])


def _flips(plan: Plan) -> str:
    if not plan.flips:
        return ""
    flips: dict[str, list[Flip]] = {}
    for flip in plan.flips:
        where = "" if flip.device_from == flip.device_to else f" on {flip.device_to}"
        flips.setdefault(f"{flip.scheme_to}{where}", []).append(flip)
    lines = tuple(
        f"{choice} pays from {' or '.join(_edge(flip) for flip in found)} "
        f"(now {', '.join(_value(flip, flip.from_value) for flip in found)})"
        for choice, found in flips.items()
    )
    return "What would change the choice, each alone:\n" + "\n".join(
        textwrap.fill(line, 100, initial_indent="  - ", subsequent_indent="    ") for line in lines
    )


def _edge(flip: Flip) -> str:
    sign = "≥" if flip.to_value > flip.from_value else "≤"
    name = {"env_step_s": "an env step", "observation_size": "observations"}.get(
        flip.parameter, flip.parameter
    )
    return f"{name} {sign} {_value(flip, flip.to_value)}"


def _value(flip: Flip, value: float) -> str:
    return format_seconds(value) if flip.parameter == "env_step_s" else f"{value:,.0f}"


def _bullets(lines: tuple[str, ...]) -> str:
    return "\n".join(f"  - {line}" for line in lines)
