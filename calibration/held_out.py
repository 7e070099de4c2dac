"""Times random tasks that no calibration times, and holds what was predicted of them against that.

Every task is visited in several passes, each in another random order; how far the first pass and
the last one differ (A/A) is what no prediction can be better than.

Run on a quiet machine: python calibration/held_out.py   (about 8 minutes with its calibration)
"""

import argparse
import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before numpy, whose OpenBLAS it tells to let its threads sleep.
from autoplace import calibrate, device, fit_cost_model  # isort: split

import numpy as np

from autoplace.cost_model import Cost, CostModel
from autoplace.engines import EAGER
from autoplace.measure.probes import build_probe, timed_tasks
from autoplace.measure.timing import Series, run_probe
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.store import read_calibration
from autoplace.workload import NetworkSpec

LARGEST_PRODUCT = 3e8  # rows x parameters, so that no single call takes long
LEAST_SAMPLES = 5  # of a task in each pass
# How often each op is drawn.
SHARES = {
    "matmul": 25,
    "elementwise": 5,
    "policy_step": 30,
    "update": 29,
    "first_update": 3,
    "gae": 7,
    "bookkeeping": 1,
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One task that was held out.

    Attributes:
        task: what was timed.
        cost: what was predicted of it.
        passes: its measurement in each pass.
    """

    task: Task
    cost: Cost
    passes: tuple[Measurement, ...]

    @property
    def measured_s(self) -> float:
        """Median of the passes' medians."""
        return float(np.median([m.median_s for m in self.passes]))

    @property
    def error_fraction(self) -> float:
        """Relative error of the prediction."""
        return abs(self.cost.seconds / self.measured_s - 1)

    @property
    def noise_fraction(self) -> float:
        """By how much the first and the last pass differ."""
        return abs(self.passes[-1].median_s / self.passes[0].median_s - 1)

    @property
    def is_covered(self) -> bool:
        """Whether what was measured is inside the stated 90 % interval."""
        return self.cost.low_s <= self.measured_s <= self.cost.high_s

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "task": self.task.to_json(),
            "predicted_s": self.cost.seconds,
            "low_s": self.cost.low_s,
            "high_s": self.cost.high_s,
            "source": self.cost.source,
            "passes_s": [m.median_s for m in self.passes],
        }


# --------------------------------------------------------------------------------------------------
# Which tasks


def held_out_tasks(calibration: Calibration, count: int, seed: int = 0) -> list[Task]:
    """Random tasks that ``calibration`` does not hold, even in the logarithms of sizes."""
    rng = random.Random(seed)
    found: dict[Task, None] = {}
    while len(found) < count:
        task = _draw(rng, calibration)
        timed = timed_tasks(task)
        if _work(task) <= LARGEST_PRODUCT and not any(t in calibration.by_task for t in timed):
            found[task] = None
    return list(found)


def _draw(rng: random.Random, calibration: Calibration) -> Task:
    def size(low: float, high: float) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    (op,) = rng.choices(list(SHARES), list(SHARES.values()))
    on = rng.choice(calibration.devices)
    threads = size(1, calibration.machine.usable_cpus) if on == device.CPU else 1
    if op == "matmul":
        shape = size(8, 2048), size(4, 1024), size(4, 1024)
        return Task(op=op, device=on, threads=threads, shape=shape)
    if op == "elementwise":
        return Task(op=op, device=on, threads=threads, shape=(size(1 << 12, 1 << 22),))
    if op == "bookkeeping":
        return Task(op=op, shape=(size(32, 512), size(1, 32), rng.randint(2, 17), size(1, 10)))
    engines = {m.task.engine for m in calibration.measurements if m.task.network is not None}
    engine = rng.choice(sorted(engines)) if on == device.CPU else EAGER
    network = NetworkSpec(
        observation_size=size(4, 400),
        hidden_sizes=(size(32, 768),) * rng.choice((1, 2, 2, 2, 3)),
        action_size=rng.randint(2, 17),
        continuous=rng.random() < 0.5,
    )
    if op == "gae":
        shape = size(32, 512), size(4, 64)
        return Task(op=op, device=on, threads=threads, network=network, shape=shape, engine=engine)
    rows = size(1, 256) if op == "policy_step" else size(32, 4096)
    return Task(op=op, device=on, threads=threads, network=network, rows=rows, engine=engine)


def _work(task: Task) -> float:
    """Rows times parameters."""
    if task.network is None:
        return math.prod(task.shape)
    rows = task.rows if task.op != "gae" else math.prod(task.shape)
    return float(rows * task.network.num_parameters)


# --------------------------------------------------------------------------------------------------
# Timing


def hold_out(
    model: CostModel,
    tasks: Sequence[Task],
    *,
    passes: int,
    pass_s: float,
    seed: int = 0,
) -> list[Trial]:
    """Time ``tasks`` in passes of about ``pass_s`` seconds each; predictions beside the times."""
    rng = random.Random(seed)
    taken: dict[Task, list[Measurement]] = {}
    for _ in range(passes):
        for task in rng.sample(list(tasks), len(tasks)):
            for measurement in _visit(task, pass_s / len(tasks)):
                taken.setdefault(measurement.task, []).append(measurement)
    costs = model.predict(taken)
    return [Trial(task=t, cost=costs[t], passes=tuple(taken[t])) for t in taken]


def _visit(task: Task, time_limit_s: float) -> list[Measurement]:
    series = Series(tasks=timed_tasks(task))
    device.let_threads_sleep()
    with device.torch_threads(task.threads, task.engine):
        probe = build_probe(task)
        try:
            run_probe(probe, series, time_limit_s=time_limit_s, min_samples=LEAST_SAMPLES)
        finally:
            probe.close()
    return series.measurements()


# --------------------------------------------------------------------------------------------------
# The verdict


def summary(trials: Iterable[Trial]) -> dict[str, float]:
    """Errors, noise and coverage of some trials."""
    trials = list(trials)
    errors = [t.error_fraction for t in trials]
    noise = [t.noise_fraction for t in trials]
    return {
        "tasks": len(trials),
        "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
        "median_noise": float(np.median(noise)),
        "p90_noise": float(np.quantile(noise, 0.9)),
        "coverage": float(np.mean([t.is_covered for t in trials])),
    }


def as_text(trials: Sequence[Trial]) -> str:
    """A table by op, engine, device and threads."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        task = trial.task
        threads = f" x {task.threads}" if task.device == device.CPU else ""
        engine = f" ({task.engine})" if task.network is not None else ""
        groups.setdefault(f"{task.op}{engine} on {task.device}{threads}", []).append(trial)
    heads = ("error: median", 15), ("p90", 8), ("A/A: median", 13), ("p90", 8), ("covered", 9)
    lines = [f"{'':36}{'tasks':>6}" + "".join(f"{head:>{width}}" for head, width in heads)]
    for name, group in (*sorted(groups.items()), ("all", list(trials))):
        row = summary(group)
        fractions = (
            f"{100 * row[key]:{width - 2}.1f} %"
            for key, width in (
                ("median_error", 15),
                ("p90_error", 8),
                ("median_noise", 13),
                ("p90_noise", 8),
                ("coverage", 9),
            )
        )
        lines.append(f"{name:36}{row['tasks']:6.0f}{''.join(fractions)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibration", type=Path, help="a file; made anew if left out")
    parser.add_argument("--budget", type=float, default=55.0, help="seconds of a new calibration")
    parser.add_argument("--tasks", type=int, default=300)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--pass-seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write calibration and trials there, as JSON")
    args = parser.parse_args()
    calibration = (
        read_calibration(args.calibration) if args.calibration else calibrate(budget_s=args.budget)
    )
    tasks = held_out_tasks(calibration, args.tasks, args.seed)
    trials = hold_out(
        fit_cost_model(calibration),
        tasks,
        passes=args.passes,
        pass_s=args.pass_seconds,
        seed=args.seed,
    )
    print(as_text(trials))
    if args.output:
        found = {
            "calibration": calibration.to_json(),
            "trials": [trial.to_json() for trial in trials],
            "summary": summary(trials),
        }
        args.output.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
