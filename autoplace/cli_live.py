"""What ``autoplace train`` shows while it runs: a live view on a terminal, else plain lines.

Nothing is drawn but between iterations, and no more than a few times a second: no thread takes time
from the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autoplace.report import describe_lag, describe_progress, describe_return
from autoplace.units import format_duration, format_rate

if TYPE_CHECKING:
    from autoplace.planner.plan import Plan
    from autoplace.results import StageKey
    from autoplace.train import Callback, IterationReport, RunStart

_REDRAW_S = 0.25
_LINE_S = 60.0  # between plain lines, at most
_MEMORY = 0.8  # of the time split, so that it can be read while it moves


class LiveView:
    """The state of what is shown, and its picture."""

    def __init__(self, start: RunStart) -> None:
        self._start = start
        self._report: IterationReport | None = None
        self._best: float | None = None
        self._split: dict[StageKey, float] = {}

    def update(self, report: IterationReport) -> None:
        """Take an iteration into account."""
        self._report = report
        if report.mean_return is not None:
            self._best = max(report.mean_return, self._best or report.mean_return)
        self._split = {
            key: _MEMORY * self._split.get(key, seconds / report.iteration_s)
            + (1 - _MEMORY) * seconds / report.iteration_s
            for key, seconds in report.stage_s.items()
        }

    def follow(self, plan: Plan) -> None:
        """Another plan holds from now on."""
        self._start = dataclasses.replace(self._start, plan=plan)
        self._split = {}

    def picture(self) -> Group:
        """What is shown now, in any width."""
        start, report = self._start, self._report
        placement = start.plan.placement
        title = Text.assemble(
            (start.plan.workload.env.id, "bold"),
            f"  {start.plan.scheme}, learning on {placement.learn_device}",
            no_wrap=True,
            overflow="crop",
        )
        if report is None:
            return Group(title, self._progress(start.env_steps), Text("warming up", style="dim"))
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="fold")
        rows.add_row("return", self._returns(report))
        rows.add_row("speed", self._speed(report))
        rows.add_row(
            "time",
            f"{format_duration(report.run_wall_s)} gone, "
            f"{format_duration(report.time_left_s)} left",
        )
        if report.max_policy_lag:
            rows.add_row("lag", describe_lag(report.policy_lag, report.max_policy_lag))
        for lane in dict.fromkeys(lane for _, lane in self._split):
            rows.add_row(lane, self._lane(lane))
        return Group(title, self._progress(report.env_steps), rows)

    def _progress(self, env_steps: int) -> Table:
        total = self._start.total_steps
        rows = Table.grid(expand=True)  # a bar does not end its own line
        rows.add_row(ProgressBar(total=total, completed=env_steps))
        rows.add_row(f"{env_steps:,} of {total:,} env steps ({env_steps / total:.0%})")
        return rows

    def _returns(self, report: IterationReport) -> str:
        if report.mean_return is None:
            return f"no episode finished yet (longest running {report.longest_running} steps)"
        return (
            f"{describe_return(report.mean_return)} over the last {min(report.num_episodes, 100)} "
            f"episodes of {report.mean_length:.0f} steps, best {describe_return(self._best)}"
        )

    def _speed(self, report: IterationReport) -> str:
        predicted = self._start.plan.chosen.env_steps_per_s
        return (
            f"{format_rate(report.env_steps_per_s)} env steps/s "
            f"({format_rate(predicted)} predicted)"
        )

    def _lane(self, lane: str) -> Text:
        shares = [(share, name) for (name, of), share in self._split.items() if of == lane]
        text = Text()
        for share, name in sorted(shares, key=lambda row: (row[1] == "wait", -row[0])):
            style = "dim" if name == "wait" else ""
            text.append(f"{name} {share:.0%}", style=style).append("  ")
        text.rstrip()
        return text


@contextlib.contextmanager
def training_view() -> Iterator[Callback]:
    """A live view on a terminal that can show one; elsewhere a line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield _plain_lines()
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield _redraws(live)


def _redraws(live: Live) -> Callback:
    from autoplace.train import Callback

    class Redraws(Callback):
        def on_start(self, start: RunStart) -> None:
            self._view = LiveView(start)
            self._draw()

        def on_switch(self, plan: Plan) -> None:
            self._view.follow(plan)

        def on_iteration(self, report: IterationReport) -> None:
            self._view.update(report)
            if time.monotonic() - self._drawn_s >= _REDRAW_S:
                self._draw()

        def _draw(self) -> None:
            live.update(self._view.picture(), refresh=True)
            self._drawn_s = time.monotonic()

    return Redraws()


def _plain_lines() -> Callback:
    """A line for each tenth of the run, and one a minute where that takes longer."""
    from autoplace.train import Callback

    class Lines(Callback):
        def on_start(self, start: RunStart) -> None:
            self._tenth = 10 * start.first_iteration // start.num_iterations
            self._said_s = time.monotonic()

        def on_iteration(self, report: IterationReport) -> None:
            tenth = 10 * report.iteration // report.num_iterations
            if tenth > self._tenth or time.monotonic() - self._said_s >= _LINE_S:
                self._tenth, self._said_s = tenth, time.monotonic()
                click.echo(describe_progress(report), err=True)

    return Lines()
