"""Calibrations of machines that are not here, from published figures. Nothing is timed.

    python -m calibration.modelled            # writes calibration/modelled-*.json anew

A machine is a dozen constants (`machines.py`): what an operation costs to issue, rates of
arithmetic, memory and link. The package's own physics (`autoplace/physics.py`) turns them into the
times of all tasks that `autoplace calibrate` would take there. Every file names its figures in
`sources`.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from autoplace.machine import Accelerator, Machine
from autoplace.measure.grid import calibration_tasks
from autoplace.measure.probes import timed_tasks
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.physics import Line, Matmul, Primitives, physics
from autoplace.store import save_calibration
from calibration.machines import MACHINES, Card, Figures, Host, Trainer, trainer

FOLDER = Path(__file__).parent
_CACHE_BYTES = 32e6  # beyond it, memory is as fast as RAM: the last-level cache of a desktop CPU
_GRAIN = 32768  # numbers from which torch splits an elementwise operation over threads


# --------------------------------------------------------------------------------------------------
# From constants to times


class _Rates(Primitives):
    """Basic rates that are known instead of fitted."""

    def __init__(self, host: Host, card: Card | None, step: Trainer) -> None:
        self.host, self.step = host, step
        self.slowness = host.op_s / step.op_s
        self.card = card
        super().__init__(
            devices=("cpu",) if card is None else ("cpu", card.device),
            dispatch_s={"cpu": host.op_s},
            launch_s={"cpu": host.op_s},
        )
        for threads in (2**k for k in range(10)):
            self.matmul["cpu", threads] = self._host_matmul(threads)
        self.matmul["cpu", host.cpus] = self._host_matmul(host.cpus)
        if card is None:
            return
        half = step.card_half_size * math.sqrt(card.flops / step.card_flops)
        self.dispatch_s[card.device] = card.issue_s
        self.launch_s[card.device] = card.issue_s + card.wait_s
        self.matmul[card.device, 1] = Matmul(
            fixed_s=card.issue_s + card.wait_s,
            flops_per_s=card.flops,
            bytes_per_s=card.bytes_per_s,
            half_rows=half,
            half_columns=half,
        )
        for direction in ("h2d", "d2h"):
            for pinned, rates in ((True, card.pinned), (False, card.pageable)):
                self.copy[card.device, direction, pinned] = Line(card.copy_s, rates[direction])

    def _host_matmul(self, threads: int) -> Matmul:
        step = self.step
        return Matmul(
            fixed_s=self.host.op_s + self.join_s(threads),
            flops_per_s=self.flops(threads),
            bytes_per_s=threads * step.product_bytes_per_s / self.slowness,
            half_rows=step.half_rows * threads**step.half_rows_scaling,
            half_columns=step.half_columns,
        )

    def flops(self, threads: int) -> float:
        """FLOP/s, between the known numbers of threads by a straight line of logarithms."""
        known = sorted(self.host.flops.items())
        cores = min(threads, self.host.cores)
        low = max((entry for entry in known if entry[0] <= cores), default=known[0])
        high = min((entry for entry in known if entry[0] >= cores), default=known[-1])
        rate = low[1]
        if high[0] > low[0]:
            share = math.log(cores / low[0]) / math.log(high[0] / low[0])
            rate = low[1] * (high[1] / low[1]) ** share
        return rate * (self.step.beyond_cores if threads > self.host.cores else 1.0)

    def join_s(self, threads: int) -> float:
        """Seconds to wake and join the threads of one product, in a tree."""
        return self.step.join_s * self.slowness * math.log2(threads)

    def memory_s(self, device: str, threads: int, nbytes: float) -> float:
        if device != "cpu":
            assert self.card is not None
            return nbytes / self.card.bytes_per_s
        step = self.step
        cores = min(threads, self.host.cores) if nbytes >= 8 * _GRAIN else 1
        rate = step.cached_bytes_per_s / self.slowness * cores**step.cached_scaling
        if nbytes > _CACHE_BYTES:
            rate = min(rate, self.host.ram_bytes_per_s)
        return nbytes / rate

    def activation_s(self, device: str, threads: int, numbers: float) -> float:
        if device != "cpu":
            return self.memory_s(device, threads, 8 * numbers)
        cores = min(threads, self.host.cores) if numbers >= _GRAIN else 1
        return numbers * self.slowness / (self.step.tanh_per_s * cores)


def task_seconds(rates: _Rates, task: Task) -> float:
    """What the task would take: the package's physics, and what it leaves to be fitted."""
    if task.op == "handoff":
        return rates.step.handoff_s * rates.slowness
    parts = physics(rates, task)
    factors = [1.0] * len(parts.flat)
    if task.network is None or task.op in ("obs_to_device", "weights_to_host"):
        return parts.total_s(factors)
    op = {"action_to_host": "policy_step", "first_update": "update"}.get(task.op, task.op)
    known = rates.step.factors.get(op, factors)
    if task.device == "cpu":
        passes = {"update": 3 * len(task.network.layers), "gae": len(task.network.layers)}
        products = passes.get(op, len(task.network.actor_layers))
        return parts.total_s(known) + products * rates.join_s(task.threads)
    # What an operation of a step takes beyond a tiny one is work of the host alone.
    card = rates.card
    assert card is not None
    factors[0] = 1 + (known[0] - 1) * rates.host.op_s / card.issue_s
    launches = len(parts.host_s) + (1 if task.op == "action_to_host" else 0)
    if parts.device_s:
        factors[launches] = card.kernel_s / card.wait_s
    return parts.total_s(factors)


def calibration(name: str) -> Calibration:
    """The calibration of one of :data:`MACHINES`."""
    figure = Figures()
    host, card = MACHINES[name](figure)
    rates = _Rates(host, card, trainer(figure))
    tasks: dict[Task, None] = {}
    for task in calibration_tasks(rates.devices, host.cpus):
        # No figure says what busy cores cost.
        if task.op not in ("interpreter", "crowd") and not task.beside:
            tasks.update(dict.fromkeys(timed_tasks(task)))
    cards = () if card is None else (
        Accelerator(
            device=card.device, name=card.name, uuid="", memory_bytes=card.memory_bytes,
            usable=True, reason=None,
        ),
    )  # fmt: skip
    return Calibration(
        machine=Machine(
            usable_cpus=host.cpus,
            logical_cpus=host.cpus,
            physical_cores=host.cores,
            cpu_quota=None,
            cpu_model=host.model,
            memory_bytes=host.memory_bytes,
            platform=host.platform,
            arch=host.arch,
            accelerators=cards,
        ),
        measurements=tuple(
            Measurement(task=task, times_s=(task_seconds(rates, task),)) for task in tasks
        ),
        origin="modelled",
        sources=figure.sources,
        warnings=("modelled from published figures: nothing was timed on this machine",),
    )


def path_of(name: str) -> Path:
    return FOLDER / f"modelled-{name}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write")
    folder = parser.parse_args().folder
    for name in MACHINES:
        made = calibration(name)
        path = save_calibration(made, folder / path_of(name).name)
        print(f"{path}: {len(made.measurements)} times from {len(made.sources)} figures")


if __name__ == "__main__":
    main()
