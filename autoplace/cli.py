"""The ``autoplace`` command. The only file that prints.

Torch is imported inside the commands that need it, so that ``--help``, and ``plan`` on a stored
calibration, answer at once.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import click

from autoplace._version import __version__
from autoplace.cli_compare import compare
from autoplace.cli_options import (
    DEFAULT_TOTAL_STEPS,
    FILE,
    FOLDER,
    env_options,
    hyperparameter_options,
    json_option,
    placement_options,
    plot_option,
    total_steps_option,
)
from autoplace.cli_output import (
    NoteHandler,
    calibration_progress,
    note,
    print_json,
)
from autoplace.cli_planning import planned, settled
from autoplace.cli_runs import INTERRUPTED, evaluate, train
from autoplace.engines import TIMED_WHERE_NAMED
from autoplace.errors import AutoplaceError, CalibrationError, EnvError, UsageError


class _Failure(click.ClickException):
    """A failure that its one-line message explains."""

    def __init__(self, error: AutoplaceError) -> None:
        super().__init__(str(error))
        self._error = error

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """Of the error, which click reads here."""
        return self._error.exit_code

    def show(self, file: IO[Any] | None = None) -> None:
        """The line, and below it the traceback of the user's own code where that raised."""
        super().show(file)
        if isinstance(self._error, EnvError) and self._error.evidence:
            click.echo(f"\n{self._error.evidence.rstrip()}", file=file, err=file is None)


class _Group(click.Group):
    """Turns the package's own errors into one line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - as in click
        try:
            return super().invoke(ctx)
        except AutoplaceError as error:
            raise _Failure(error) from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="autoplace")
def main() -> None:
    """Measure this machine once, then run PPO where it is fastest, and say why."""
    # A terminal that lacks a character must not end the program.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    logger = logging.getLogger("autoplace")
    if not any(isinstance(handler, NoteHandler) for handler in logger.handlers):
        logger.addHandler(NoteHandler(logging.WARNING))


def _draw(path: Path, plot: Callable[..., bytes], *what: object) -> None:
    """Draw something to a file, in the format that its name asks for."""
    from autoplace.plots import picture_format
    from autoplace.store import write_bytes_atomic

    write_bytes_atomic(path, plot(*what, picture_format(path)))
    note(f"drawn to {path}")


# --------------------------------------------------------------------------------------------------
# Commands


@main.command()
@plot_option("what its parts can do, as it was measured, to this file")
@json_option
def machine(plot_file: Path | None, as_json: bool) -> None:
    """Show what this machine has, and whether its calibration still holds."""
    from autoplace import report, store
    from autoplace.machine import detect_machine

    found = detect_machine()
    path = store.calibration_path(found)
    stored = store.find_calibration(found)
    calibration, reason = stored.calibration, stored.reason
    if plot_file is not None:
        if calibration is None or reason is not None:
            raise CalibrationError(f"--plot draws what was measured, and {reason}")
        from autoplace import plots
        from autoplace.kept_model import cost_model_of

        _draw(plot_file, plots.plot_machine, calibration, cost_model_of(calibration))
    if as_json:
        stale = [
            {"section": section, "reason": "; ".join(changes)}
            for section, changes in stored.stale.items()
        ]
        if calibration is None:
            stale = [{"section": "all", "reason": str(reason)}]
        state = {"path": str(path), "valid": reason is None, "stale_sections": stale}
        print_json({**found.to_json(), "calibration": state})
        return
    line = f"{path}, valid" if reason is None else reason
    click.echo(report.describe_machine(found, line))


@main.command()
@click.option(
    "--device", "devices", multiple=True, help="cpu, cuda[:i], mps or xpu; all if not given."
)
@click.option("--budget", type=float, help="Seconds to spend (default 52; with --quick 5).")
@click.option("--quick", is_flag=True, help="Ten seconds instead of a minute; less exact.")
@click.option("--env", "envs", multiple=True, metavar="ENV", help="Time this environment too.")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    type=click.Choice(TIMED_WHERE_NAMED),
    help="Time this engine with the networks of the --env environments (slow to make ready).",
)
@click.option("--force", is_flag=True, help="Measure again although a stored one still holds.")
@click.option("--output", type=FILE, help="Write to this file instead of the data folder.")
@plot_option("what each side takes by size, and where one overtakes the other, to this file")
@json_option
def calibrate(
    devices: tuple[str, ...],
    budget: float | None,
    quick: bool,
    envs: tuple[str, ...],
    engines: tuple[str, ...],
    force: bool,
    output: Path | None,
    plot_file: Path | None,
    as_json: bool,
) -> None:
    """Time this machine once and store what was measured."""
    from autoplace import report, store
    from autoplace.crossover import find_crossovers
    from autoplace.kept_model import cost_model_of
    from autoplace.machine import detect_machine
    from autoplace.measure.calibrate import (
        DEFAULT_BUDGET_S,
        QUICK_BUDGET_S,
        measure_engines,
        recalibrate,
    )
    from autoplace.measure.calibrate import calibrate as run_calibration
    from autoplace.measure.envs import measure_backends
    from autoplace.sections import is_of_env, what_holds
    from autoplace.workload import EnvSpec

    if engines and not envs:
        raise UsageError(
            f"--engine {engines[0]} is timed with the network of an environment: name one by --env"
        )
    specs = [EnvSpec.make(env) for env in envs]
    found = detect_machine()
    state = store.find_calibration(found)
    stored = state.calibration
    again = force or output is not None or stored is None or budget is not None or bool(devices)
    standard_s = QUICK_BUDGET_S if quick else DEFAULT_BUDGET_S
    if again:
        with calibration_progress() as progress:
            result = run_calibration(
                devices=list(devices) if devices and devices != ("auto",) else "auto",
                budget_s=budget if budget is not None else standard_s,
                quick=quick,
                envs=specs,
                engines=engines,
                progress=progress,
                machine=found,
            )
        if output is None and stored is not None:
            # Environments and engines that were timed earlier are kept.
            result = result.with_measurements(
                m
                for m in what_holds(stored, found).measurements
                if (m.task.op == "env_step" or m.task.engine in TIMED_WHERE_NAMED)
                and m.task not in result.by_task
            )
        path = store.save_calibration(result, output)
        note(f"saved to {path}")
    else:
        assert stored is not None
        result = stored
        if state.stale:
            lost = ", ".join(s for s in state.stale if not is_of_env(s)) or "no section"
            note(f"{str(state.reason).partition(': run ')[0]}: timing {lost} again")
            with calibration_progress() as progress:
                result = recalibrate(stored, machine=found, quick=quick, progress=progress)
            store.save_calibration(result)
        measured = [m for s in specs for m in measure_backends(s, (1, 8), found.usable_cpus)]
        more, problems = measure_engines(engines, specs, stored.devices, found.usable_cpus)
        measured += more
        for problem in problems:
            note(problem)
        if measured:
            result = store.merge_calibration(found, measured)
        held = "what else was stored" if state.stale else "the stored calibration"
        note(f"{held} still holds; --force measures again")
    if output is None:  # the model is kept for what will be read
        result = store.find_calibration(found).calibration or result
    model = cost_model_of(result)
    crossovers = find_crossovers(result, model)
    if plot_file is not None:
        from autoplace import plots

        _draw(plot_file, plots.plot_crossovers, result, model)
    if as_json:
        print_json(
            {
                "machine": result.machine.to_json(),
                "fingerprint": result.machine.fingerprint,
                "spent_s": result.spent_s,
                "crossovers": [crossover.to_json() for crossover in crossovers],
                "op_error": model.error_fractions,
                "warnings": list(result.warnings),
            }
        )
        return
    click.echo(report.describe_calibration(result, crossovers, model.error_fractions))


@main.command()
@env_options
@placement_options
@hyperparameter_options
@click.option(
    "--env-step-time",
    type=float,
    metavar="SECONDS",
    help="Of one step of one environment, instead of a measured one.",
)
@total_steps_option("Env steps of the run, over which the start of its processes is charged")
@click.option("--all", "every", is_flag=True, help="Show every candidate.")
@plot_option("an iteration by lane, beside those of the other schemes, to this file")
@click.option("--race", is_flag=True, help="Where the prediction is a tie, run both and decide.")
@click.option(
    "--for",
    "trainer",
    type=click.Choice(("sb3", "cleanrl", "sample-factory")),
    help="Show it as another trainer's own arguments, ready to paste.",
)
@json_option
def plan(
    env: str,
    env_kwargs: str | None,
    total_steps: int | None,
    every: bool,
    plot_file: Path | None,
    race: bool,
    trainer: str | None,
    as_json: bool,
    **options: Any,  # noqa: ANN401
) -> None:
    """Show what would be fastest for ENV here, why, and what would change the answer."""
    from autoplace.planner.explain import explain_plan
    from autoplace.planner.handover import TRAINERS

    is_here = options["calibration"] is None
    if race and not is_here:
        raise UsageError("--race runs on this machine, not on that of --calibration: leave one out")
    result = planned(env, env_kwargs, options, total_steps or DEFAULT_TOTAL_STEPS).plan
    if is_here:
        result = settled(result, lambda: race)
    if race and not result.raced:
        note("not raced: the choice is clear")
    if plot_file is not None:
        from autoplace import plots

        _draw(plot_file, plots.plot_plan, result)
    if trainer is not None:
        arguments = TRAINERS[trainer](result)
        if as_json:
            print_json(arguments.to_json())
        else:
            click.echo(arguments.to_text())
    elif as_json:
        print_json(result.to_json())
    else:
        click.echo(explain_plan(result, every_candidate=every))


@main.command()
@click.argument("run_dir", type=FOLDER)
@click.option("--output", type=FILE, required=True, help="The ONNX file to write.")
@json_option
def export(run_dir: Path, output: Path, as_json: bool) -> None:
    """Write the policy of a run as one ONNX file, and check that it computes the same."""
    from autoplace import report
    from autoplace.export import export_onnx

    result = export_onnx(run_dir, output)
    if as_json:
        print_json(result.to_json())
        return
    click.echo(report.describe_export(result))


main.add_command(train)
main.add_command(compare)
main.add_command(evaluate)
