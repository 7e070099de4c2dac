"""Results as text for people. Pure functions: values in, strings out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from autoplace.crossover import Crossover
from autoplace.machine import Machine
from autoplace.measurement import Calibration, Measurement
from autoplace.planner.explain import describe_placement
from autoplace.results import Forecast, StageComparison
from autoplace.units import (
    format_bytes,
    format_duration,
    format_percent,
    format_rate,
    format_seconds,
    significant,
)
from autoplace.workload import EnvSpec

if TYPE_CHECKING:  # these types come with torch, their text does not need it
    from autoplace.export import ExportResult
    from autoplace.measure.calibrate import Progress
    from autoplace.race import RaceResult
    from autoplace.train import EvaluationResult, IterationReport

_KEY_WIDTH = 16


def describe_machine(machine: Machine, calibration_line: str) -> str:
    """What ``autoplace machine`` prints."""
    quota = "none" if machine.cpu_quota is None else f"{machine.cpu_quota:g} CPUs"
    rows = [
        ("CPU", machine.cpu_model),
        (
            "usable CPUs",
            f"{machine.usable_cpus} of {machine.logical_cpus} in the affinity mask "
            f"({machine.physical_cores} physical cores, quota {quota})",
        ),
        ("memory", format_bytes(machine.memory_bytes)),
    ]
    if not machine.accelerators:
        rows.append(("accelerators", "none that torch can see"))
    for accelerator in machine.accelerators:
        state = "works" if accelerator.usable else f"not usable: {accelerator.reason}"
        memory = f", {format_bytes(accelerator.memory_bytes)}" if accelerator.memory_bytes else ""
        rows.append((accelerator.device, f"{accelerator.name}{memory}, {state}"))
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions)
    rows += [
        ("versions", versions),
        ("fingerprint", machine.fingerprint),
        ("calibration", calibration_line),
    ]
    return "\n".join(f"{key:<{_KEY_WIDTH}}{value}" for key, value in rows)


def describe_calibration(
    calibration: Calibration, crossovers: Sequence[Crossover], errors: dict[str, float]
) -> str:
    """What ``autoplace calibrate`` prints."""
    parts = [
        f"{len(calibration.measurements)} tasks timed in {format_seconds(calibration.spent_s)} on "
        f"{', '.join(calibration.devices)}",
        _crossover_table(crossovers),
        _env_table(calibration.measurements),
        _error_line(errors),
    ]
    parts += [f"Warning: {warning}" for warning in calibration.warnings]
    return "\n\n".join(part for part in parts if part)


def _crossover_table(crossovers: Sequence[Crossover]) -> str:
    if not crossovers:
        return ""
    lines = [
        "Crossovers: the size from which the second side is the faster one",
        f"{'family':<9}{'data':<10}{'first side':<17}{'second side':<17}{'size':>7}"
        f"   {'90 % interval':<18}timed: slower / faster at",
    ]
    for crossover in crossovers:
        size = "none" if crossover.size is None else f"{crossover.size:.0f}"
        timed = " / ".join(
            "-" if value is None else str(value)
            for value in (crossover.slower_below, crossover.faster_above)
        )
        lines.append(
            f"{crossover.family:<9}{crossover.residency:<10}{crossover.baseline:<17}"
            f"{crossover.challenger:<17}{size:>7}   {_interval(crossover):<18}{timed}"
        )
    return "\n".join(lines)


def _interval(crossover: Crossover) -> str:
    if crossover.size is None and crossover.low is None:
        return ""
    low = "below" if crossover.low is None else f"{crossover.low:.0f}"
    high = "beyond" if crossover.high is None else f"{crossover.high:.0f}"
    return f"{low} to {high}"


def _env_table(measurements: Iterable[Measurement]) -> str:
    rows = [m for m in measurements if m.task.op == "env_step" and m.task.env is not None]
    if not rows:
        return ""
    names = {m.task.env: _env_name(m.task.env) for m in rows if m.task.env is not None}
    width = max(len("environment"), *map(len, names.values())) + 2
    lines = [
        "Vector steps under random actions, and what a policy step takes more behind one",
        f"{'environment':<{width}}{'backend':<13}{'envs':>5}{'step':>10}{'spread':>9}"
        f"{'episode':>11}{'its end':>10}   policy step",
    ]
    for m in rows:
        task, episodes = m.task, m.episodes
        assert task.env is not None
        workers = f" x {task.workers}" if task.workers else ""
        length = f"{episodes.steps:,.0f} steps" if episodes else "-"
        end = format_seconds(episodes.end_s) if episodes else "-"
        cold = ", ".join(f"{engine} {format_seconds(s)}" for engine, s in m.cold_s) or "-"
        lines.append(
            f"{names[task.env]:<{width}}{f'{task.backend}{workers}':<13}{task.num_envs:>5}"
            f"{format_seconds(m.median_s):>10}{format_percent(m.spread_fraction):>9}"
            f"{length:>11}{end:>10}   {cold}"
        )
    return "\n".join(lines)


def _env_name(env: EnvSpec) -> str:
    return env.id if env.kwargs_json == "{}" else f"{env.id} {env.kwargs_json}"


def _error_line(errors: dict[str, float]) -> str:
    if not errors:
        return ""
    text = ", ".join(f"{name} {format_percent(error)}" for name, error in errors.items())
    return f"Error of the fit at sizes left out, median: {text}"


def describe_calibration_progress(progress: Progress) -> str:
    """What is being timed, and how long it goes on."""
    what = f"{progress.task.op} on {progress.task.device}"
    return f"{format_duration(progress.left_s)} left, {'refining ' * progress.refining}{what}"


def describe_stages(rows: Sequence[StageComparison]) -> str:
    """Predicted against measured, stage by stage, per iteration."""
    lines = [
        f"{'lane':<9}{'stage':<20}{'predicted':>11}   {'90 % interval':<24}{'measured':>11}"
        f"{'ratio':>8}"
    ]
    for row in rows:
        interval = (
            f"{format_seconds(row.low_s)} to {format_seconds(row.high_s)}"
            if row.high_s > row.low_s
            else ""
        )
        measured = "-" if row.measured_s is None else format_seconds(row.measured_s)
        ratio = (
            significant(row.measured_s / row.predicted_s)
            if row.measured_s is not None and row.predicted_s > 0
            else ""
        )
        lines.append(
            f"{row.lane:<9}{row.name:<20}{format_seconds(row.predicted_s):>11}   "
            f"{interval:<24}{measured:>11}{ratio:>8}"
        )
    return "\n".join(lines)


def describe_restarts(count: int) -> str:
    """How often a worker of the environments was started anew."""
    workers = "1 environment worker was" if count == 1 else f"{count} environment workers were"
    return f"{workers} lost and restarted: the steps in flight were left out"


def describe_return(mean_return: float | None) -> str:
    """A mean return, or that there is none yet."""
    return "(no episode finished yet)" if mean_return is None else f"{mean_return:.1f}"


def describe_lag(mean: float, maximum: int) -> str:
    """How old the weights were that sampled; nothing where they were those that learned."""
    if not maximum:
        return ""
    return f"policy lag {mean:.2f} iterations" + f" (at most {maximum})" * (mean < maximum)


def describe_progress(report: IterationReport) -> str:
    """One line on a run that goes on."""
    if report.mean_return is None:
        returns = f"no episode finished yet (longest running {report.longest_running} steps)"
    else:
        returns = f"return {report.mean_return:.1f}"
    parts = (
        f"{report.env_steps:,} of {report.total_steps:,} steps",
        f"{format_rate(report.env_steps_per_s)} steps/s",
        returns,
        describe_lag(report.policy_lag, report.max_policy_lag),
        f"{format_duration(report.time_left_s)} left",
    )
    return ", ".join(part for part in parts if part)


def describe_forecast(forecast: Forecast) -> str:
    """What a run would do, nothing of which was done."""
    steps = forecast.iterations * forecast.iteration_rows
    on = f" after the {forecast.first_iteration:,} that are done" * bool(forecast.first_iteration)
    return "\n".join(
        (
            f"Dry run: nothing was written. It would train into {forecast.run_dir}",
            f"{forecast.iterations:,} iterations of {forecast.iteration_rows:,} env steps{on}: "
            f"{steps:,} env steps, seed {forecast.seed}",
            f"in about {format_duration(forecast.predicted_s)}, start-up left out",
        )
    )


def describe_evaluation(result: EvaluationResult) -> str:
    """Returns under a frozen policy."""
    how = "deterministic" if result.deterministic else "stochastic"
    return (
        f"mean return {result.mean_return:.1f} (standard deviation {result.std_return:.1f}) over "
        f"{result.episodes} {how} episodes, after {result.env_steps:,} env steps of training"
    )


def describe_export(result: ExportResult) -> str:
    """What was exported, and whether it was compared."""
    inputs = ", ".join(f"{name} ({kind})" for name, kind in result.inputs)
    if result.parity_error is None:
        parity = "not compared with the policy: pip install onnxruntime to have that done"
    else:
        parity = (
            f"differs from the policy by at most {significant(result.parity_error)} on "
            f"{result.parity_rows} observations of the environment"
        )
    return f"{result.path}: {inputs} -> {', '.join(result.outputs)}\n{parity}"


def describe_throughput(predicted: float, measured: float) -> str:
    """One line: the promise and what came of it."""
    return (
        f"{format_rate(measured)} env steps/s measured, {format_rate(predicted)} predicted "
        f"(ratio {significant(measured / predicted)})"
    )


def describe_comparison(result: RaceResult) -> str:
    """What ``autoplace compare`` prints."""
    width = max(len(entrant.name) for entrant in result.entrants) + 2
    lines = [
        f"{'':<{width}}{'env steps/s':>24}{'ratio':>8}{'x efficiency':>14}{'=':>10}",
        f"{'candidate':<{width}}{'predicted':>12}{'measured':>12}",
    ]
    for entrant in result.entrants:
        candidate = entrant.candidate
        ratio = entrant.env_steps_per_s / candidate.env_steps_per_s
        lines.append(
            f"{entrant.name:<{width}}{format_rate(candidate.env_steps_per_s):>12}"
            f"{format_rate(entrant.env_steps_per_s):>12}{significant(ratio):>8}"
            f"{candidate.sample_efficiency:>14.2f}{format_rate(entrant.score):>10}"
        )
    parts = ["\n".join(lines)]
    for entrant in result.entrants:
        placement = describe_placement(entrant.candidate.placement)
        parts.append(
            f"{entrant.name}: scheme {entrant.candidate.scheme}, {placement}\n"
            f"{describe_stages(entrant.stages)}"
        )
    parts.append(_verdict(result))
    return "\n\n".join(parts)


def _verdict(result: RaceResult) -> str:
    noise = f"halves of the same candidate differ by {format_percent(result.noise_fraction)}"
    if result.best is result.chosen:
        first = f"The choice, {result.chosen.name}, was the fastest"
    else:
        first = f"The choice was {result.chosen.name}, the fastest was {result.best.name}"
    return (
        f"{first}; regret {format_percent(result.regret_fraction)} "
        f"(best picked on one half of the turns, scored on the other), {noise}."
    )
