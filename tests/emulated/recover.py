"""Calibrate an emulated machine as a black box, and compare all that is claimed with the truth.

    python -m tests.emulated.recover SPEC.json [SPEC.json ...] [--json] [--workloads NAME ...]

For each machine: every known constant beside the one that a calibration through the clock alone
gives back; each matmul crossover beside the true one; and, for each of the spec's workloads, every
scheme's predicted iteration time beside the true (virtual) time of the real trainer. As many
machines at a time as there are CPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import logging
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from autoplace.cost_model import CostModel, fit_cost_model
from autoplace.crossover import find_crossovers
from autoplace.errors import AutoplaceError
from autoplace.machine import detect_machine
from autoplace.measure import calibrate as calibration_module
from autoplace.measure import timing
from autoplace.measure.envs import env_tasks, measure_env
from autoplace.measurement import Calibration, Task
from autoplace.planner.plan import Plan
from autoplace.planner.schemes import SCHEMES
from autoplace.planner.search import make_plan
from autoplace.results import RunResult
from autoplace.train import train
from autoplace.workload import EnvSpec, Hyperparameters, NetworkSpec, Workload
from tests.emulated.machine import EmulatedMachine
from tests.emulated.spec import MachineSpec, WorkloadSpec, load_spec

ENV_FILE = Path(__file__).with_name("env.py")
BUDGET_S = 600.0  # virtual seconds: every task gets its turn
ITERATIONS = 3  # of each true run; the first warms up and does not count
OVERLAPPED_ITERATIONS = 6  # the last one ends a pipeline and is no measure of it


@dataclass(frozen=True, slots=True)
class Pair:
    """A true value and the one that was found."""

    name: str
    known: float | None
    found: float | None

    @property
    def error_fraction(self) -> float:
        """Relative error; 0 where both are zero or absent, 1 where one is."""
        if not self.known or not self.found:
            return float(bool(self.known) != bool(self.found))
        return abs(self.found / self.known - 1)


def calibrate_machine(
    spec: MachineSpec, envs: Sequence[EnvSpec] = (), *, quick: bool = False
) -> Calibration:
    """What ``autoplace calibrate`` measures on the machine, through its clock only."""
    with EmulatedMachine(spec, dry=True) as machine:
        calibration = calibrate_on(machine, quick=quick)
        measurements = [
            measurement
            for env, numbers in _numbers(spec, envs).items()
            for measurement in measure_env(env, env_tasks(env, numbers))
        ]
    return calibration.with_measurements(measurements)


def calibrate_on(machine: EmulatedMachine, *, quick: bool = False) -> Calibration:
    """The calibration, without environments, of a machine that is switched on.

    Without noise every sample of a task is the same, however many calls it consists of: as few as
    possible of either are taken then. Weights are all alike, since no time depends on them.
    """
    with _alike_samples() if machine.spec.noise.is_off else contextlib.nullcontext():
        return calibration_module.calibrate(
            budget_s=BUDGET_S, quick=quick, machine=machine.machine()
        )


@contextlib.contextmanager
def _alike_samples() -> Iterator[None]:
    with (
        mock.patch.multiple(timing, MIN_SAMPLE_S=0.0, MIN_SAMPLES_TO_JUDGE=timing.MIN_SAMPLES),
        mock.patch.object(calibration_module, "_SECOND_VISITS", 0.0),
        mock.patch.object(
            torch.nn.init, "orthogonal_", lambda weight, *_, **__: weight.fill_(0.01)
        ),
    ):
        yield


def _numbers(spec: MachineSpec, envs: Sequence[EnvSpec]) -> dict[EnvSpec, tuple[int, ...]]:
    numbers: dict[EnvSpec, tuple[int, ...]] = {}
    for workload in spec.workloads:
        env = env_of(workload)
        if env in envs:
            numbers[env] = (*numbers.get(env, (1,)), workload.num_envs)
    return numbers


def env_of(workload: WorkloadSpec) -> EnvSpec:
    """The emulated environment of a workload."""
    return EnvSpec.make(f"{ENV_FILE}:make_env", workload.env_kwargs)


def workload_of(spec: WorkloadSpec) -> Workload:
    """A workload of the spec as the planner sees it."""
    return Workload(
        env=env_of(spec),
        network=NetworkSpec(
            observation_size=spec.obs_dim,
            hidden_sizes=spec.hidden_sizes,
            action_size=spec.num_actions,
            continuous=spec.continuous,
        ),
        hyperparameters=Hyperparameters(
            num_envs=spec.num_envs,
            rollout_steps=spec.rollout_steps,
            minibatch_rows=spec.minibatch_rows,
            epochs=spec.epochs,
            hidden_sizes=spec.hidden_sizes,
        ),
        action_bytes=4 * spec.num_actions if spec.continuous else 8,
    )


# --------------------------------------------------------------------------------------------------
# Constants


def recovered_constants(spec: MachineSpec, model: CostModel) -> list[Pair]:
    """Every number of the spec that a calibration can see, beside the one it gave."""
    primitives = model.primitives
    cpu, cores = spec.cpu, spec.cpu.cores
    one, all_of_them = primitives.matmul["cpu", 1], primitives.matmul["cpu", cores]
    pairs = [
        Pair("cpu.op_s", cpu.op_s, primitives.dispatch_s["cpu"]),
        Pair("cpu.flops_per_s", cpu.flops_per_s, one.flops_per_s),
        Pair(
            "cpu.mem_bytes_per_s", cpu.mem_bytes_per_s, primitives.elementwise["cpu", 1].bytes_per_s
        ),
    ]
    if cores > 1:
        gain = all_of_them.flops_per_s / one.flops_per_s
        pairs.append(Pair("cpu.thread_efficiency", cpu.thread_efficiency, (gain - 1) / (cores - 1)))
    for index, accelerator in enumerate(spec.accelerators):
        name, at = f"emu:{index}", f"accelerators[{index}]."
        matmul = primitives.matmul[name, 1]
        memory = primitives.elementwise[name, 1]
        pairs += [
            Pair(at + "host_dispatch_s", accelerator.host_dispatch_s, primitives.dispatch_s[name]),
            Pair(at + "launch_s", accelerator.launch_s, primitives.launch_only_s(name)),
            Pair(at + "flops_per_s", accelerator.flops_per_s, matmul.flops_per_s),
            Pair(at + "mem_bytes_per_s", accelerator.mem_bytes_per_s, memory.bytes_per_s),
        ]
        # A copy is queued by the host like a kernel; what remains of its fixed time is the link's.
        latencies = [
            primitives.copy[name, direction, pinned].fixed_s - primitives.dispatch_s[name]
            for direction in ("h2d", "d2h")
            for pinned in (True, False)
        ]
        pairs.append(
            Pair(at + "copy_latency_s", accelerator.copy_latency_s, statistics.median(latencies))
        )
        for direction in ("h2d", "d2h"):
            for pinned in (True, False):
                kind = "pinned" if pinned else "pageable"
                prefix = "d2h_" if direction == "d2h" else ""
                pairs.append(
                    Pair(
                        f"{at}{prefix}{kind}_bytes_per_s",
                        accelerator.bytes_per_s(direction, pinned=pinned),
                        primitives.copy[name, direction, pinned].bytes_per_s,
                    )
                )
    return pairs


# --------------------------------------------------------------------------------------------------
# Crossovers


def true_matmul_s(spec: MachineSpec, task: Task) -> float:
    """What a square product costs on the machine, by the clock's own table."""
    (n, _, _) = task.shape
    flops, nbytes = 2.0 * n**3, 12.0 * n**2
    if task.device == "cpu":
        cpu = spec.cpu
        speedup = cpu.speedup(task.threads)
        rate = cpu.flops_per_s * speedup * cpu.efficiency.factor(n)
        return cpu.op_s + max(flops / rate, nbytes / (cpu.mem_bytes_per_s * speedup))
    accelerator = spec.accelerators[int(task.device.partition(":")[2])]
    rate = accelerator.flops_per_s * accelerator.efficiency.factor(n)
    dispatch_s = accelerator.host_dispatch_s
    kernel_s = accelerator.launch_s + max(flops / rate, nbytes / accelerator.mem_bytes_per_s)
    if task.residency == "resident":
        return dispatch_s + kernel_s

    def link_s(direction: str) -> float:
        return accelerator.copy_latency_s + nbytes / 3 / accelerator.bytes_per_s(
            direction, pinned=False
        )

    # Both operands go there and are waited for; the host queues the way back during the kernel.
    there_s = 2 * (dispatch_s + link_s("h2d"))
    return there_s + dispatch_s + max(kernel_s, dispatch_s) + link_s("d2h")


def true_crossing(
    spec: MachineSpec, baseline: Callable[[float], Task], challenger: Callable[[float], Task]
) -> float | None:
    """The size after which the challenger stays faster, by bisection on the true costs."""

    def slower(size: float) -> bool:
        first = true_matmul_s(spec, baseline(size))
        return true_matmul_s(spec, challenger(size)) > first

    sizes = [8 * 2 ** (step / 16) for step in range(9 * 16 + 1)]
    for low, high in reversed(list(itertools.pairwise(sizes))):
        if slower(high):
            return None
        if slower(low):
            for _ in range(40):
                middle = (low * high) ** 0.5
                low, high = (middle, high) if slower(middle) else (low, middle)
            return high
    return None


def recovered_crossovers(
    spec: MachineSpec, calibration: Calibration, model: CostModel
) -> list[dict[str, Any]]:
    """Each matmul crossover, found and true."""
    rows = []
    for found in find_crossovers(calibration, model):
        if found.family != "matmul":
            continue
        sides = [
            _side(name, found.threads, residency)
            for name, residency in (
                (found.baseline, "resident"),
                (found.challenger, found.residency),
            )
        ]
        rows.append(
            {
                "name": f"{found.baseline} against {found.challenger}, {found.residency}",
                "known": true_crossing(spec, *sides),
                "recovered": found.size,
                "low": found.low,
                "high": found.high,
            }
        )
    return rows


def _side(name: str, threads: int, residency: str) -> Callable[[float], Task]:
    device, _, rest = name.partition(",")
    count = int(rest.split()[0]) if rest else 1

    def task(size: float) -> Task:
        return Task(
            op="matmul",
            device=device,
            threads=count,
            residency=residency,
            shape=(size, size, size),  # type: ignore[arg-type] - a true cost has no grid
        )

    return task


# --------------------------------------------------------------------------------------------------
# Workloads


def run_truly(spec: MachineSpec, plan: Plan) -> RunResult:
    """The real trainer on the machine, in virtual time."""
    with EmulatedMachine(spec, dry=True):
        rows = plan.workload.hyperparameters.rollout_rows
        overlaps = any(s.policy_lag for s in SCHEMES if s.name == plan.scheme)
        return train(plan, total_steps=(OVERLAPPED_ITERATIONS if overlaps else ITERATIONS) * rows)


def compare_workload(
    spec: MachineSpec, workload: WorkloadSpec, calibration: Calibration, model: CostModel
) -> dict[str, Any]:
    """Every scheme's prediction beside its truth, and which one was chosen."""
    described = workload_of(workload)
    chosen = make_plan(calibration, described, model=model)
    schemes = []
    for scheme in SCHEMES:
        try:
            plan = make_plan(calibration, described, scheme=scheme.name, model=model)
        except AutoplaceError:
            continue  # no accelerator
        result = run_truly(spec, plan)
        schemes.append(
            {
                "scheme": scheme.name,
                "predicted_s": plan.chosen.iteration_s,
                "true_s": result.iteration_s,
                "sample_efficiency": plan.chosen.sample_efficiency,
                "stages": [
                    {
                        "name": stage.name,
                        "lane": stage.lane,
                        "predicted_s": stage.total_s,
                        "true_s": result.stage_s.get((stage.name, stage.lane)),
                    }
                    for stage in plan.chosen.stages
                ],
            }
        )
    return {"name": workload.name, "chosen": chosen.scheme, "schemes": schemes}


def recover(
    spec: MachineSpec, workloads: Iterable[str] | None = None, *, quick: bool = False
) -> dict[str, Any]:
    """Everything about one machine, in the format that the spec's users expect."""
    wanted = [w for w in spec.workloads if workloads is None or w.name in set(workloads)]
    calibration = calibrate_machine(spec, [env_of(workload) for workload in wanted], quick=quick)
    model = fit_cost_model(calibration)
    return {
        "machine": spec.name,
        "constants": [
            {"name": pair.name, "known": pair.known, "recovered": pair.found}
            for pair in recovered_constants(spec, model)
        ],
        "crossovers": recovered_crossovers(spec, calibration, model),
        "workloads": [compare_workload(spec, w, calibration, model) for w in wanted],
    }


# --------------------------------------------------------------------------------------------------
# Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How good the predictions and the choices of several machines were.

    Attributes:
        cases: workloads on machines.
        right: cases in which the chosen scheme is truly the best, or within 3 % of it.
        errors: relative errors of every predicted iteration time.
    """

    cases: int
    right: int
    errors: tuple[float, ...]

    @property
    def right_fraction(self) -> float:
        """Share of right choices."""
        return self.right / self.cases

    @property
    def median_error(self) -> float:
        """Median relative error of an iteration time."""
        return statistics.median(self.errors)

    @property
    def p95_error(self) -> float:
        """95th percentile of the relative errors."""
        ordered = sorted(self.errors)
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def judge(results: Sequence[dict[str, Any]]) -> Verdict:
    """The verdict over every machine's workloads."""
    cases = right = 0
    errors: list[float] = []
    for result in results:
        for workload in result["workloads"]:
            # A choice weighs speed by what a policy lag costs in env steps.
            times = {
                row["scheme"]: row["true_s"] / row["sample_efficiency"]
                for row in workload["schemes"]
            }
            cases += 1
            right += times[workload["chosen"]] <= 1.03 * min(times.values())
            errors += [abs(r["predicted_s"] / r["true_s"] - 1) for r in workload["schemes"]]
    return Verdict(cases=cases, right=right, errors=tuple(errors))


def as_text(result: dict[str, Any]) -> str:
    """The tables of one machine."""
    lines = [f"== {result['machine']}"]
    for row in result["constants"]:
        error = Pair(row["name"], row["known"], row["recovered"]).error_fraction
        lines.append(
            f"{row['name']:<44}{row['known']:>12.5g}{row['recovered']:>12.5g}{100 * error:>8.2f} %"
        )
    for row in result["crossovers"]:
        known, found, low, high = (
            "-" if row[key] is None else f"{row[key]:.0f}"
            for key in ("known", "recovered", "low", "high")
        )
        lines.append(f"{row['name']:<44}{known:>12}{found:>12}   ({low} to {high})")
    for workload in result["workloads"]:
        best = min(row["true_s"] / row["sample_efficiency"] for row in workload["schemes"])
        for row in workload["schemes"]:
            marks = ("*" if row["true_s"] / row["sample_efficiency"] == best else "") + (
                "<- chosen" if row["scheme"] == workload["chosen"] else ""
            )
            lines.append(
                f"{workload['name']:<30}{row['scheme']:<14}{1e3 * row['predicted_s']:>11.3f} ms"
                f"{1e3 * row['true_s']:>11.3f} ms"
                f"{100 * (row['predicted_s'] / row['true_s'] - 1):>+8.1f} %  {marks}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specs", nargs="+", metavar="SPEC")
    parser.add_argument("--workloads", nargs="+", default=None)
    parser.add_argument("--quick", action="store_true", help="calibrate as --quick does")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    specs = [load_spec(name) for name in args.specs]
    results = []
    with ProcessPoolExecutor(
        min(len(specs), detect_machine().usable_cpus),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
    ) as pool:
        work = functools.partial(recover, workloads=args.workloads, quick=args.quick)
        for result in pool.map(work, specs):
            results.append(result)
            if not args.json:
                print(as_text(result), flush=True)
    if args.json:
        json.dump(results[0] if len(results) == 1 else results, sys.stdout, indent=1)
        print()
        return
    verdict = judge(results)
    if verdict.cases:
        print(
            f"== {verdict.right} of {verdict.cases} choices are the best or within 3 % of it; "
            f"iteration times: median error {100 * verdict.median_error:.1f} %, "
            f"95th percentile {100 * verdict.p95_error:.1f} %"
        )


def _start_worker() -> None:
    logging.getLogger("autoplace").setLevel(logging.ERROR)
    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
