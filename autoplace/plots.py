"""Pictures: an iteration by lane, crossovers, and what a machine's parts can do.

Each function returns the picture as bytes in the format that a file name asks for. Matplotlib, an
optional extra, is imported when a picture is asked for, without its global state and without any
display.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autoplace.cost_model import CostModel
from autoplace.crossover import Crossover, Side, compared_sides, find_crossovers
from autoplace.errors import UsageError
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.planner.explain import describe_placement
from autoplace.planner.plan import LANES, Candidate, Plan, Stage
from autoplace.units import format_rate, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# One colour per stage in every picture; hues that colour-blind people can tell apart (Okabe and Ito
# 2008), the same hue light and dark where two stages belong together.
_STAGE_COLOURS = {
    "env_step": "#E69F00",
    "policy_step": "#56B4E9",
    "obs_to_device": "#C79FC0",
    "action_to_host": "#CC79A7",
    "rollout_to_device": "#9C4F7A",
    "gae": "#8FD3BF",
    "update": "#009E73",
    "weights_to_host": "#D55E00",
    "handoff": "#F0E442",
}
_WAIT_COLOUR = "#ECECEC"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#000000")
_LOW = 0.25  # share of the height below which a strip has no room for its name
_LONGEST = 2.5  # times the choice's iteration that fit on the axis
_VISIBLE = 0.002  # share of the width that anything takes at least
_LETTER = 0.0062  # share of the width that a letter takes


def picture_format(path: Path) -> str:
    """The format that a file name asks for; checked before anything is measured.

    Raises:
        UsageError: matplotlib is missing, or cannot write such a file.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise UsageError(
            f"--plot needs matplotlib, which is not installed ({error}): "
            "pip install 'autoplace[plots]'"
        ) from error
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    suffix = path.suffix.lower().lstrip(".")
    if suffix not in known:
        raise UsageError(
            f"--plot writes {', '.join(known)}, got {path}: end the name in .png, for example"
        )
    return suffix


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _rendered(figure: Figure, suffix: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, dpi=150)
    return buffer.getvalue()


# --------------------------------------------------------------------------------------------------
# A plan: one iteration by lane


@dataclass(frozen=True, slots=True)
class _Block:
    """Stages that take turns on a lane within a stretch of time."""

    start_s: float
    end_s: float
    stages: tuple[Stage, ...]


def _blocks(candidate: Candidate, lane: str) -> list[_Block]:
    """What a lane does, waits left out: stages whose stretches overlap alternate step by step."""
    stages = sorted(
        (s for s in candidate.stages if s.lane == lane and s.name != "wait" and s.total_s > 0),
        key=lambda stage: stage.start_s,
    )
    blocks: list[_Block] = []
    for stage in stages:
        if blocks and stage.start_s < blocks[-1].end_s * (1 - 1e-9):
            last = blocks.pop()
            blocks.append(_Block(last.start_s, last.end_s + stage.total_s, (*last.stages, stage)))
        else:
            blocks.append(_Block(stage.start_s, stage.start_s + stage.total_s, (stage,)))
    return blocks


def _copies(stage: Stage) -> list[_Block]:
    """The single copies of a stage: each leaves with its chunk, or when the link is free again."""
    each_s = stage.total_s / stage.calls
    blocks, free_s = [], 0.0
    for index in range(stage.calls):
        start_s = max(free_s, stage.start_s * (index + 1))
        free_s = start_s + each_s
        blocks.append(_Block(start_s, free_s, (stage,)))
    return blocks


def plot_plan(plan: Plan, suffix: str) -> bytes:
    """One iteration of the choice, by lane, above the best of the other schemes."""
    shown = [c for c in plan.best_of_schemes.values() if c.stages]
    lanes = {c.scheme: [n for n in LANES if any(s.lane == n for s in c.stages)] for c in shown}
    figure = _figure(11, 1.6 + sum(0.55 + 0.5 * len(lanes[c.scheme]) for c in shown))
    axes = figure.subplots(
        len(shown),
        1,
        sharex=True,
        squeeze=False,
        height_ratios=[0.8 + len(lanes[c.scheme]) for c in shown],
    )[:, 0]
    # Whatever takes far longer than the choice runs out of the picture.
    width_s = min(
        1.02 * max(max(c.high_s, c.iteration_s) for c in shown),
        _LONGEST * plan.chosen.iteration_s,
    )
    scale, unit = _scale(width_s)
    for axis, candidate in zip(axes, shown, strict=True):
        _draw_iteration(axis, candidate, lanes[candidate.scheme], scale, width_s)
    axes[-1].set_xlabel(f"{unit} from the start of an iteration")
    axes[-1].set_xlim(0, width_s * scale)
    hyper = plan.workload.hyperparameters
    figure.suptitle(
        f"{plan.workload.env.id}: {plan.scheme}, about "
        f"{format_rate(plan.chosen.env_steps_per_s)} env steps/s; bottleneck {plan.bottleneck}\n"
        f"{hyper.rollout_rows:,} env steps an iteration, {hyper.epochs} epochs",
        fontsize=11,
    )
    _stage_legend(figure, shown)
    return _rendered(figure, suffix)


def _draw_iteration(
    axis: Axes, candidate: Candidate, lanes: Sequence[str], scale: float, width_s: float
) -> None:
    for row, lane in enumerate(lanes):
        axis.barh(row, candidate.iteration_s * scale, 0.8, color=_WAIT_COLOUR, zorder=0)
        if lane == "copy":
            blocks = [b for s in candidate.stages if s.lane == lane and s.name != "wait"
                      for b in _copies(s)]  # fmt: skip
        else:
            blocks = _blocks(candidate, lane)
        for block in blocks:
            _draw_block(axis, block, row, scale, width_s)
    if candidate.iteration_s < width_s:
        axis.axvline(candidate.iteration_s * scale, color="black", linewidth=1)
        axis.hlines(
            len(lanes) - 0.45,
            candidate.low_s * scale,
            candidate.high_s * scale,
            color="black",
            linewidth=4,
        )
    axis.set_yticks(range(len(lanes)), lanes)
    axis.set_ylim(len(lanes) - 0.3, -0.55)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False)
    efficiency = (
        ""
        if candidate.sample_efficiency == 1
        else f" x {candidate.sample_efficiency:.2f} efficiency"
    )
    beyond = "" if candidate.iteration_s < width_s else " (beyond the picture)"
    axis.set_title(
        f"{candidate.scheme}: {format_seconds(candidate.iteration_s)}{beyond}, "
        f"{format_rate(candidate.env_steps_per_s)} env steps/s{efficiency}; "
        f"{describe_placement(candidate.placement)}",
        loc="left",
        fontsize=8.5,
    )


def _draw_block(axis: Axes, block: _Block, row: int, scale: float, width_s: float) -> None:
    """A block, split in strips as high as each stage's share of it."""
    length_s = min(max(block.end_s - block.start_s, _VISIBLE * width_s), width_s - block.start_s)
    if length_s <= 0:
        return
    middle_s = block.start_s + length_s / 2
    room = length_s / (_LETTER * width_s)  # letters that fit
    top = row - 0.4
    for stage in block.stages:
        share = stage.total_s / sum(s.total_s for s in block.stages)
        axis.barh(
            top + 0.4 * share,
            length_s * scale,
            0.8 * share,
            left=block.start_s * scale,
            color=_STAGE_COLOURS.get(stage.name, "grey"),
        )
        texts = (f"{stage.name} {format_seconds(stage.total_s)}", stage.name, "")
        axis.text(
            middle_s * scale,
            top + 0.4 * share,
            next(text for text in texts if len(text) <= room) if share > _LOW else "",
            ha="center",
            va="center",
            fontsize=7,
        )
        top += 0.8 * share


def _stage_legend(figure: Figure, shown: Sequence[Candidate]) -> None:
    from matplotlib.patches import Patch

    names = {stage.name for candidate in shown for stage in candidate.stages}
    handles = [Patch(color=c, label=name) for name, c in _STAGE_COLOURS.items() if name in names]
    handles.append(Patch(color=_WAIT_COLOUR, label="wait"))
    handles.append(Patch(color="black", label="90 % interval of the iteration"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, frameon=False)


def _scale(seconds: float) -> tuple[float, str]:
    for limit, scale, unit in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms")):
        if seconds >= limit:
            return scale, unit
    return 1e6, "µs"


# --------------------------------------------------------------------------------------------------
# A calibration: who is faster from which size on


def plot_crossovers(calibration: Calibration, model: CostModel, suffix: str) -> bytes:
    """What each side takes by size, on logarithmic axes, and where one overtakes the other."""
    found = list(
        zip(compared_sides(calibration, model), find_crossovers(calibration, model), strict=True)
    )
    rows = [d for d in model.devices if d != "cpu"] or ["cpu"]
    families = ("matmul", "update")
    figure = _figure(12, 0.6 + 5.2 * len(rows))
    axes = figure.subplots(len(rows), len(families), squeeze=False)
    for line, device in zip(axes, rows, strict=True):
        for axis, family in zip(line, families, strict=True):
            here = [
                (sides[1:], crossover)
                for sides, crossover in found
                if crossover.family == family and sides[2](8).device == device
            ]
            _draw_crossovers(axis, calibration, model, here)
            axis.set_title(
                "matrix product n x n x n"
                if family == "matmul"
                else "gradient step, 256 rows, two hidden layers of n",
                fontsize=10,
            )
            axis.set_xlabel("n")
    origin = " (a modelled machine)" if calibration.origin == "modelled" else ""
    figure.suptitle(
        f"{calibration.machine.cpu_model}{origin}: timed (dots), fitted (lines, 90 % bands)",
        fontsize=11,
    )
    return _rendered(figure, suffix)


_Found = tuple[tuple[Side, Side], Crossover]


def _draw_crossovers(
    axis: Axes, calibration: Calibration, model: CostModel, found: Sequence[_Found]
) -> None:
    from autoplace.crossover import SIZES

    sides: dict[str, Side] = {}
    for (baseline, challenger), _ in found:
        for side in (baseline, challenger):
            sides.setdefault(_label(side(8)), side)
    for label, side in sides.items():
        colour = _side_colour(side(8))
        costs = model.predict([side(size) for size in SIZES])
        line = [costs[side(size)] for size in SIZES]
        axis.fill_between(
            SIZES, [c.low_s for c in line], [c.high_s for c in line], color=colour, alpha=0.15
        )
        axis.plot(SIZES, [c.seconds for c in line], color=colour, label=label)
        timed = {
            size: calibration.by_task[side(size)]
            for size in (2**power for power in range(3, 13))
            if side(size) in calibration.by_task
        }
        axis.plot(
            list(timed), [m.median_s for m in timed.values()], "o", color=colour, markersize=4
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set(xlim=(SIZES[0], SIZES[-1]), ylim=axis.get_ylim())
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axis.yaxis.set_major_formatter(lambda value, _: format_seconds(value))
    axis.grid(alpha=0.25)
    for (baseline, challenger), crossover in found:
        _mark(axis, model, baseline, challenger, crossover)
    axis.legend(fontsize=7.5, loc="upper left")


def _mark(
    axis: Axes, model: CostModel, baseline: Side, challenger: Side, crossover: Crossover
) -> None:
    against = f"{_label(challenger(8))} against {_label(baseline(8))}"
    if crossover.size is None:
        axis.plot([], [], " ", label=f"no crossing: {against}")
        return
    size = crossover.size
    task = baseline(round(size))
    seconds = model.predict([task])[task].seconds
    low = crossover.low if crossover.low is not None else axis.get_xlim()[0]
    high = crossover.high if crossover.high is not None else axis.get_xlim()[1]
    interval = (
        f"{'below' if crossover.low is None else f'{low:.0f}'} to "
        f"{'beyond' if crossover.high is None else f'{high:.0f}'}"
    )
    axis.plot(
        size,
        seconds,
        "D",
        color="black",
        markersize=5,
        zorder=5,
        label=f"{size:.0f} ({interval}): {against}",
    )
    axis.hlines(seconds, low, high, color="black", linewidth=1.5, zorder=5)
    axis.vlines(size, axis.get_ylim()[0], seconds, color="black", linewidth=0.7, linestyle=":")
    axis.annotate(
        f"{size:.0f}",
        (size, seconds),
        xytext=(4, -11) if crossover.threads == 1 else (-16, 6),
        textcoords="offset points",
        fontsize=8,
        fontweight="bold",
    )


def _side_colour(task: Task) -> str:
    """Of the CPU with one thread, of it with several, of an accelerator with and without copies."""
    if task.device == "cpu":
        return _COLOURS[0 if task.threads == 1 else 4]
    return _COLOURS[3 if task.residency == "copied" else 1]


def _label(task: Task) -> str:
    if task.device == "cpu":
        return f"cpu, {task.threads} thread" + ("s" if task.threads != 1 else "")
    return task.device + (", copied there and back" if task.residency == "copied" else "")


# --------------------------------------------------------------------------------------------------
# A machine: what its parts can do


def plot_machine(calibration: Calibration, model: CostModel, suffix: str) -> bytes:
    """Arithmetic by size, threads, memory and links, and the fixed cost of every operation."""
    figure = _figure(12, 8.5)
    axes = figure.subplots(2, 2)
    _draw_arithmetic(axes[0, 0], calibration)
    _draw_threads(axes[0, 1], calibration)
    _draw_bytes(axes[1, 0], calibration)
    _draw_fixed(axes[1, 1], calibration, model)
    machine = calibration.machine
    cards = ", ".join(a.name for a in machine.accelerators if a.usable) or "no accelerator"
    origin = " (modelled)" if calibration.origin == "modelled" else ""
    figure.suptitle(
        f"{machine.cpu_model}{origin}, {machine.usable_cpus} usable CPUs, {cards}", fontsize=11
    )
    return _rendered(figure, suffix)


def _of(calibration: Calibration, op: str, **fields: object) -> list[Measurement]:
    return [
        m
        for m in calibration.measurements
        if m.task.op == op and all(getattr(m.task, name) == v for name, v in fields.items())
    ]


def _sides(rows: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """The measurements of each accelerator, and of the CPU with one thread and with most."""
    most = max((m.task.threads for m in rows if m.task.device == "cpu"), default=1)
    sides: dict[str, list[Measurement]] = {}
    for row in rows:
        if row.task.device != "cpu" or row.task.threads in (1, most):
            sides.setdefault(_label(row.task), []).append(row)
    return dict(sorted(sides.items()))


def _draw_arithmetic(axis: Axes, calibration: Calibration) -> None:
    squares = [
        m for m in _of(calibration, "matmul", residency="resident") if len(set(m.task.shape)) == 1
    ]
    for colour, (label, rows) in zip(itertools.cycle(_COLOURS), _sides(squares).items()):
        rate = {m.task.shape[0]: 2e-9 * m.task.shape[0] ** 3 / m.median_s for m in rows}
        sizes = sorted(rate)
        axis.plot(sizes, [rate[n] for n in sizes], "o-", color=colour, markersize=4, label=label)
    axis.set(title="matrix products n x n x n", xlabel="n", ylabel="GFLOP/s")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    _plain_rates(axis)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)


def _plain_rates(axis: Axes) -> None:
    for formatted in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        formatted(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else "")


def _draw_threads(axis: Axes, calibration: Calibration) -> None:
    """How much faster n threads are than one, at a few sizes."""
    squares = [m for m in _of(calibration, "matmul", device="cpu") if len(set(m.task.shape)) == 1]
    by_size: dict[int, dict[int, float]] = {}
    for m in squares:
        by_size.setdefault(m.task.shape[0], {})[m.task.threads] = m.median_s
    shown = {n: times for n, times in sorted(by_size.items()) if 1 in times and len(times) > 1}
    most = max((max(times) for times in shown.values()), default=1)
    for index, (n, times) in enumerate(shown.items()):
        counts = sorted(times)
        colour = str(0.75 - 0.7 * index / max(1, len(shown) - 1))
        axis.plot(
            counts, [times[1] / times[c] for c in counts], "o-", color=colour, label=f"n = {n}"
        )
    axis.plot([1, most], [1, most], ":", color="grey", label="ideal")
    axis.set(title="matrix products on several threads", xlabel="threads", ylabel="times as fast")
    axis.set_xticks(sorted({count for times in shown.values() for count in times}))
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)


def _draw_bytes(axis: Axes, calibration: Calibration) -> None:
    colours = itertools.cycle(_COLOURS)
    for label, rows in _sides(_of(calibration, "elementwise")).items():
        pairs = sorted((8 * m.task.shape[0], m.median_s) for m in rows)  # read and written
        _draw_rate(axis, pairs, f"memory of {label}", next(colours), "o-")
    kinds = {
        (m.task.device, m.task.direction, m.task.pinned): None for m in _of(calibration, "copy")
    }
    for device, direction, pinned in kinds:
        rows = _of(calibration, "copy", device=device, direction=direction, pinned=pinned)
        pairs = sorted((m.task.shape[0], m.median_s) for m in rows)
        where = f"to {device}" if direction == "h2d" else f"from {device}"
        label = f"{where}, {'page-locked' if pinned else 'ordinary'} memory"
        _draw_rate(axis, pairs, label, next(colours), "s--" if pinned else "^:")
    axis.set(title="memory and copies", xlabel="bytes", ylabel="GB/s")
    axis.set_xscale("log")
    axis.set_yscale("log")
    _plain_rates(axis)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7)


def _draw_rate(
    axis: Axes, pairs: Sequence[tuple[int, float]], label: str, colour: str, style: str
) -> None:
    axis.plot(
        [nbytes for nbytes, _ in pairs],
        [1e-9 * nbytes / seconds for nbytes, seconds in pairs],
        style,
        color=colour,
        markersize=4,
        label=label,
    )


def _draw_fixed(axis: Axes, calibration: Calibration, model: CostModel) -> None:
    """What anything costs before it has done anything."""
    bars: dict[str, float] = {}
    for device in model.devices:
        for op, text in (("dispatch", "issue an operation"), ("launch", "and wait for it")):
            for m in _of(calibration, op, device=device):
                bars[f"{device}: {text}"] = m.median_s
    for m in _of(calibration, "handoff"):
        bars["message to another process and back"] = m.median_s
    rows = range(len(bars))
    axis.barh(rows, list(bars.values()), 0.35, color=_COLOURS[0])
    for row, (text, seconds) in enumerate(bars.items()):
        axis.text(0.01, row - 0.33, f"{text}: {format_seconds(seconds)}",
                  transform=axis.get_yaxis_transform(), va="center", fontsize=9)  # fmt: skip
    axis.set(title="fixed costs", yticks=[], ylim=(len(bars) - 0.5, -0.7))
    axis.xaxis.set_major_formatter(lambda value, _: format_seconds(value))
    axis.grid(alpha=0.25, axis="x")
