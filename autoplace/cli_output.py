"""What the commands show while they work: notes, progress, one JSON object a line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from autoplace.measure.calibrate import Progress
    from autoplace.planner.plan import Plan
    from autoplace.results import RunResult
    from autoplace.train import Callback, IterationReport, RunStart
    from autoplace.train.self_check import Check


class NoteHandler(logging.Handler):
    """Shows the library's warnings as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show one."""
        note(record.getMessage())


def note(line: str) -> None:
    """Say something on stderr that is no part of the result."""
    # Not click.echo, which would write past a live view that is on the terminal.
    print(f"autoplace: {line}", file=sys.stderr)


@contextlib.contextmanager
def calibration_progress() -> Iterator[Callable[[Progress], None]]:
    """A progress bar on stderr while something is being timed; nothing if nothing is."""
    from rich import progress as rich_progress
    from rich.console import Console

    from autoplace.report import describe_calibration_progress

    bar = rich_progress.Progress(
        rich_progress.TextColumn("calibrating"),
        rich_progress.BarColumn(),
        rich_progress.TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=True,
    )
    row = bar.add_task("", total=1.0)

    def show(progress: Progress) -> None:
        bar.start()
        done = progress.elapsed_s / max(progress.elapsed_s + progress.left_s, 1e-9)
        bar.update(row, completed=done, description=describe_calibration_progress(progress))

    try:
        yield show
    finally:
        bar.stop()


@contextlib.contextmanager
def race_progress() -> Iterator[Callable[[float], None]]:
    """A progress bar on stderr while candidates run."""
    from rich import progress as rich_progress
    from rich.console import Console

    console = Console(stderr=True)
    with rich_progress.Progress(
        rich_progress.TextColumn("comparing"),
        rich_progress.BarColumn(),
        rich_progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        row = bar.add_task("", total=1.0)
        yield lambda share: bar.update(row, completed=share)


def print_json(value: object) -> None:
    """Print one JSON object on one line."""
    click.echo(json.dumps(value, ensure_ascii=False, allow_nan=False))


def json_events() -> Callback:
    """One JSON object a line: start, each iteration, end."""
    from autoplace.results import stage_seconds
    from autoplace.train import Callback

    class Events(Callback):
        def on_start(self, start: RunStart) -> None:
            print_json(
                {
                    "event": "start",
                    "env": start.plan.workload.env.id,
                    "scheme": start.plan.scheme,
                    "placement": start.plan.placement.to_json(),
                    "seed": start.seed,
                    "total_steps": start.total_steps,
                    "env_steps": start.env_steps,
                    "run_dir": str(start.run_dir),
                }
            )

        def on_iteration(self, report: IterationReport) -> None:
            print_json(
                {
                    "event": "iteration",
                    "iteration": report.iteration,
                    "env_steps": report.env_steps,
                    "env_steps_per_s": report.env_steps_per_s,
                    "mean_return": report.mean_return,
                    "mean_length": report.mean_length,
                    "policy_lag": report.policy_lag,
                    "max_policy_lag": report.max_policy_lag,
                    "iteration_s": report.iteration_s,
                    "time_left_s": report.time_left_s,
                    "stage_s": stage_seconds(report.stage_s),
                    "losses": dataclasses.asdict(report.update),
                }
            )

        def on_check(self, check: Check) -> None:
            print_json({"event": "check", **check.to_json()})

        def on_switch(self, plan: Plan) -> None:
            print_json(
                {
                    "event": "switch",
                    "scheme": plan.scheme,
                    "placement": plan.placement.to_json(),
                    "predicted_iteration_s": plan.chosen.iteration_s,
                }
            )

        def on_end(self, result: RunResult) -> None:
            print_json({"event": "end", **result.to_json()})

    return Events()
