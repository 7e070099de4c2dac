"""Calibrations of machines that are not here, from published figures. Nothing is timed.

    python calibration/modelled.py            # writes calibration/modelled-*.json anew

A machine is a dozen constants: what an operation costs to issue, rates of arithmetic, memory and
link. Each constant is read from `figures.csv` (published, with its source; rows R.. are from this
project's own reference machine) or is one of the defaults below, for figures that nobody published
for that machine. The package's own physics (`autoplace/physics.py`) turns them into the times of
all tasks that `autoplace calibrate` would take there. No constant was chosen by looking at a
published training rate. Every file names its figures in `sources`.

Defaults, where a machine has no figure of its own:

- An operation takes 2 us to issue on a desktop or laptop core (B003), 5 us on a server's or rented
  core, which clock lower (B002: the two published figures).
- A GPU operation takes 7 us to issue (B013), on a server 8 us (B009); waiting for one takes 9 us
  more (B010 - B009); queued kernels follow each other every 2.7 us (B019).
- A datasheet's rates are reached as far as another card of the maker reaches its own.
- A CPU with a figure for all cores alone reaches, on one core, that share / 0.875 (12 cores are
  10.5 times as fast as one: B168, B166).
- Copies as on PCIe 3.0 (B053 to B057), which later links exceed: no figures for those were found.
- Caches, shapes of products, joining of threads, and how much more than their number of operations
  the trainer's own steps cost: as on the reference machine (R01 to R16), scaled by the issue time.
- More threads than cores reach 0.91 of the cores' rate (B165 / B164 and B169 / B168).
- A product of matrices on a GPU reaches half its rate at 71 rows or columns on a card of
  17.4 TFLOP/s (fitted to B080 to B092, within 7 %), and at more on a faster one, as sqrt(rate).
- Sizes of memories, and what a machine is called, are the makers'; they decide what fits, no time.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from autoplace.machine import Accelerator, Machine
from autoplace.measure.grid import calibration_tasks
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.physics import Line, Matmul, Primitives, physics
from autoplace.store import save_calibration

FOLDER = Path(__file__).parent
_UNITS = {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "GB/s": 1e9, "G/s": 1e9, "us": 1e-6, "us/op": 1e-6,
          "ms": 1e-3, "x": 1.0, "rows": 1.0, "columns": 1.0}  # fmt: skip
_CACHE_BYTES = 32e6  # beyond it, memory is as fast as RAM: the last-level cache of a desktop CPU
_GRAIN = 32768  # numbers from which torch splits an elementwise operation over threads
_GIB = 2**30


class Figures:
    """Published figures in SI units by id; remembers which were asked for."""

    def __init__(self) -> None:
        with (FOLDER / "figures.csv").open(encoding="utf-8", newline="") as file:
            self._rows = {row["id"]: row for row in csv.DictReader(file)}
        self._used: dict[str, None] = {}

    def __call__(self, name: str) -> float:
        self._used[name] = None
        row = self._rows[name]
        return float(row["value"]) * _UNITS[row["unit"]]

    @property
    def sources(self) -> tuple[str, ...]:
        rows = [self._rows[name] for name in sorted(self._used)]
        return tuple(
            f"{row['id']}: {row['device']}, {row['quantity']}: {row['value']} {row['unit']} "
            f"({row['source']})"
            for row in rows
        )


@dataclass(frozen=True, kw_only=True)
class Host:
    """A CPU: logical CPUs, seconds to issue an operation, FLOP/s by number of threads."""

    model: str
    cores: int
    cpus: int
    memory_bytes: int
    op_s: float
    flops: dict[int, float]
    ram_bytes_per_s: float
    platform: str = "linux"
    arch: str = "x86_64"


@dataclass(frozen=True, kw_only=True)
class Card:
    """An accelerator: rates, and seconds to issue, to wait for, and between queued kernels."""

    device: str = "cuda:0"
    name: str
    memory_bytes: int
    flops: float
    bytes_per_s: float
    issue_s: float
    wait_s: float
    kernel_s: float
    copy_s: float
    pinned: dict[str, float]
    pageable: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What the trainer's steps cost beside their operations (R02 to R16), on the reference."""

    op_s: float
    tanh_per_s: float
    cached_bytes_per_s: float
    cached_scaling: float
    product_bytes_per_s: float
    half_rows: float
    half_rows_scaling: float
    half_columns: float
    join_s: float
    handoff_s: float
    beyond_cores: float
    card_half_size: float
    card_flops: float
    factors: dict[str, tuple[float, ...]]


def trainer(figure: Figures) -> Trainer:
    half_size, flops = _card_shape(figure)
    return Trainer(
        op_s=figure("R01"),
        tanh_per_s=figure("R02"),
        cached_bytes_per_s=figure("R03"),
        cached_scaling=math.log2(figure("R04") / figure("R03")),
        product_bytes_per_s=figure("R05"),
        half_rows=figure("R06"),
        half_rows_scaling=math.log2(figure("R07") / figure("R06")),
        half_columns=figure("R08"),
        join_s=figure("R09"),
        handoff_s=figure("R10"),
        beyond_cores=math.sqrt(figure("B165") / figure("B164") * figure("B169") / figure("B168")),
        card_half_size=half_size,
        card_flops=flops,
        factors={
            "update": (figure("R11"), 1.0, figure("R12"), figure("R13"), figure("R14")),
            "policy_step": (figure("R15"), 1.0, 1.0),
            "gae": (figure("R16"), 1.0, 1.0, 1.0),
        },
    )


def _card_shape(figure: Figures) -> tuple[float, float]:
    """Rows (or columns) at half rate, and full rate, of the card whose products were published.

    Fitted to a + 2 N^3 / R (1 + h / N)^2, equal weight on relative errors; three digits are kept.
    """
    names = ("B080", "B082", "B084", "B086", "B088", "B090", "B092")
    sizes = np.array([128, 256, 512, 1024, 2048, 4096, 8192], dtype=float)
    flops = 2 * sizes**3
    seconds = flops / np.array([figure(name) for name in names])

    def log_ratio(theta: np.ndarray) -> np.ndarray:
        fixed_s, half_size, rate = np.exp(theta)
        return np.log((fixed_s + flops / rate * (1 + half_size / sizes) ** 2) / seconds)

    fit = least_squares(log_ratio, np.log([6e-6, 50, 17e12]))
    _, half_size, rate = (float(f"{value:.3g}") for value in np.exp(fit.x))
    return half_size, rate


# --------------------------------------------------------------------------------------------------
# From constants to times


class _Rates(Primitives):
    """Basic rates that are known instead of fitted."""

    def __init__(self, host: Host, card: Card | None, step: Trainer) -> None:
        self.host, self.step = host, step
        self.slowness = host.op_s / step.op_s
        self.card = card
        self.devices = ("cpu",) if card is None else ("cpu", card.device)
        self.dispatch_s = {"cpu": host.op_s}
        self.launch_s = {"cpu": host.op_s}
        self.matmul = {}
        self.elementwise, self.activation, self.copy = {}, {}, {}
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
    known = rates.step.factors.get(task.op.replace("action_to_host", "policy_step"))
    assert known is not None, task.op
    if task.device == "cpu":
        passes = {"update": 3 * len(task.network.layers), "gae": len(task.network.layers)}
        products = passes.get(task.op, len(task.network.actor_layers))
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
        tasks.update(dict.fromkeys(_timed_parts(task)))
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


def _timed_parts(task: Task) -> tuple[Task, ...]:
    """As the probe of a policy step on an accelerator tells its parts apart."""
    if task.op != "policy_step" or task.device == "cpu":
        return (task,)
    ops = ("obs_to_device", "policy_step", "action_to_host")
    return tuple(
        Task(op=op, device=task.device, network=task.network, rows=task.rows) for op in ops
    )


# --------------------------------------------------------------------------------------------------
# Machines


def _one_core(figure: Figures, all_cores: float, cores: int) -> dict[int, float]:
    """FLOP/s of one core where only that of all is known."""
    efficiency = figure("B168") / figure("B166") / 12
    return {1: all_cores / cores / efficiency, cores: all_cores}


def _zen3(figure: Figures, cores: int) -> dict[int, float]:
    """FLOP/s of Zen 3 desktop cores, beyond 12 at the rate per core of 12."""
    twelve = figure("B168")
    rates = {1: figure("B166"), 4: figure("B167"), 12: twelve}
    return {**rates, cores: twelve * cores / 12}


def _desktop_op_s(figure: Figures) -> float:
    return figure("B003")


def _server_op_s(figure: Figures) -> float:
    return figure("B002")


def _cuda(
    figure: Figures,
    name: str,
    gib: int,
    flops: float,
    bytes_per_s: float,
    *,
    issue_s: float | None = None,
    wait_s: float | None = None,
    copy_s: float | None = None,
    pinned: tuple[str, str] = ("B055", "B056"),
) -> Card:
    """A card with CUDA; what is not given takes the defaults of a desktop."""
    issue_s = figure("B013") if issue_s is None else issue_s
    return Card(
        name=name,
        memory_bytes=gib * _GIB,
        flops=flops,
        bytes_per_s=bytes_per_s,
        issue_s=issue_s,
        wait_s=figure("B010") - figure("B009") if wait_s is None else wait_s,
        kernel_s=figure("B019"),
        copy_s=issue_s + figure("B057") if copy_s is None else copy_s,
        pinned={"h2d": figure(pinned[0]), "d2h": figure(pinned[1])},
        pageable={"h2d": figure("B053"), "d2h": figure("B054")},
    )


def _geforce_flops(figure: Figures, datasheet: float) -> float:
    """A GeForce's rate from its datasheet, as far as a 3090 reaches its own."""
    return datasheet * figure("B146") / figure("B223")


def _geforce_bytes(figure: Figures, datasheet: float) -> float:
    return datasheet * figure("B147") / figure("B219")


def _rtx_3090_5950x(figure: Figures) -> tuple[Host, Card]:
    host = Host(
        model="AMD Ryzen 9 5950X",
        cores=16,
        cpus=32,
        memory_bytes=64 * _GIB,
        op_s=_desktop_op_s(figure),
        flops=_zen3(figure, 16),
        ram_bytes_per_s=figure("B111"),
    )
    return host, _cuda(figure, "NVIDIA GeForce RTX 3090", 24, figure("B146"), figure("B147"))


def _rtx_3060_ti_windows(figure: Figures) -> tuple[Host, Card]:
    # The CPU is not named: 8 cores of B163 reach B028. Its forward pass (B022) of 5 operations
    # streams 597 KB of weights on one thread besides: 36 us - 597 KB / 28.4 GB/s = 5 x 3.0 us.
    weights_s = 4 * (300 * 256 + 256 * 256 + 256 * 26) / figure("R05")
    # A layer's operation takes 40 to 50 us under WDDM, its 5 and the wait at the end B023.
    issue_s = 45e-6
    all_cores = 2 * 4096 * 256 * 256 / figure("B028")
    host = Host(
        model="8 cores (of a published report that does not name them)",
        cores=8,
        cpus=16,
        memory_bytes=32 * _GIB,
        op_s=(figure("B022") - weights_s) / 5,
        flops={1: figure("B163"), 8: all_cores},
        ram_bytes_per_s=figure("B111"),
        platform="win32",
    )
    card = _cuda(
        figure,
        "NVIDIA GeForce RTX 3060 Ti",
        8,
        _geforce_flops(figure, figure("B225")),
        _geforce_bytes(figure, figure("B221")),  # of a 3060: there is none for the Ti
        issue_s=issue_s,
        wait_s=figure("B023") - 5 * issue_s,
        copy_s=(figure("B025") - figure("B023")) / 2,  # one there and one back
    )
    return host, card


def _rtx_4090_7950x(figure: Figures) -> tuple[Host, Card]:
    host = Host(
        model="AMD Ryzen 9 7950X",
        cores=16,
        cpus=32,
        memory_bytes=64 * _GIB,
        op_s=_desktop_op_s(figure),
        flops=_one_core(figure, figure("B112"), 16),
        ram_bytes_per_s=figure("B113"),
    )
    return host, _cuda(figure, "NVIDIA GeForce RTX 4090", 24, figure("B150"), figure("B151"))


def _rtx_3060_laptop(figure: Figures) -> tuple[Host, Card]:
    host = Host(
        model="6 cores of a laptop (rates of an Intel i5-12400)",
        cores=6,
        cpus=12,
        memory_bytes=16 * _GIB,
        op_s=_desktop_op_s(figure),
        flops=_one_core(figure, figure("B120"), 6),
        ram_bytes_per_s=figure("B121"),
    )
    card = _cuda(
        figure,
        "NVIDIA GeForce RTX 3060 Laptop GPU",
        6,
        _geforce_flops(figure, figure("B224")),
        figure("B070"),
        pinned=("B068", "B069"),
    )
    return host, card


def _gtx_1080_ti_16_cores(figure: Figures) -> tuple[Host, Card]:
    host = Host(
        model="16 cores (rates of an Intel Xeon Gold 6230)",
        cores=16,
        cpus=16,
        memory_bytes=64 * _GIB,
        op_s=_server_op_s(figure),
        flops=_one_core(figure, figure("B128") * 16 / 20, 16),
        ram_bytes_per_s=figure("B129"),
    )
    card = _cuda(
        figure,
        "NVIDIA GeForce GTX 1080 Ti",
        11,
        _geforce_flops(figure, figure("B226")),
        _geforce_bytes(figure, figure("B228")),  # of a 2080 Ti: there is none for the 1080 Ti
        issue_s=figure("B009"),
    )
    return host, card


def _t4_2_cores(figure: Figures) -> tuple[Host, Card]:
    host = Host(
        model="2 rented cores (rates of an Intel Xeon Silver 4116)",
        cores=2,
        cpus=2,
        memory_bytes=12 * _GIB,
        op_s=_server_op_s(figure),
        flops=_one_core(figure, figure("B126") * 2 / 12, 2),
        ram_bytes_per_s=figure("B127"),
    )
    card = _cuda(
        figure,
        "NVIDIA Tesla T4",
        16,
        figure("B134"),
        figure("B135"),
        issue_s=figure("B009"),
        pinned=("B060", "B061"),
    )
    return host, card


def _a100_server(figure: Figures) -> tuple[Host, Card]:
    host = Host(
        model="2 x AMD EPYC 7742 (rates of an EPYC 7763 each)",
        cores=128,
        cpus=256,
        memory_bytes=1024 * _GIB,
        op_s=_server_op_s(figure),
        flops=_one_core(figure, 2 * figure("B118"), 128),
        ram_bytes_per_s=figure("B119"),
    )
    card = _cuda(
        figure,
        "NVIDIA A100-SXM4-80GB",
        80,
        figure("B138"),
        figure("B139"),
        issue_s=figure("B009"),
        pinned=("B063", "B064"),
    )
    return host, card


def _h100_server(figure: Figures) -> tuple[Host, Card]:
    host = Host(
        model="Intel Xeon Platinum 8358",
        cores=32,
        cpus=64,
        memory_bytes=256 * _GIB,
        op_s=_server_op_s(figure),
        flops=_one_core(figure, figure("B132"), 32),
        ram_bytes_per_s=figure("B133"),
    )
    card = _cuda(
        figure,
        "NVIDIA H100 80GB HBM3",
        80,
        figure("B204") * figure("B138") / figure("B206"),  # as far as an A100 reaches its own
        figure("B217") * figure("B139") / figure("B216"),
        issue_s=figure("B009"),
        pinned=("B063", "B064"),
    )
    return host, card


def _m2_laptop(figure: Figures) -> tuple[Host, Card]:
    one_thread = figure("B100")
    host = Host(
        model="Apple M2",
        cores=8,
        cpus=8,
        memory_bytes=16 * _GIB,
        op_s=_desktop_op_s(figure),
        flops={1: one_thread, 8: one_thread * figure("B160") / figure("B159")},
        ram_bytes_per_s=figure("B101"),
        platform="darwin",
        arch="arm64",
    )
    # One kernel, issued and waited for, at 16384 x 64 and at 1000000 x 128 numbers: the line
    # through both starts at 0.27 ms.
    small, large = 16384 * 64, 1_000_000 * 128
    per_number_s = (figure("B203") - figure("B199")) / (large - small)
    issue_s = figure("B013")
    wait_s = figure("B199") - small * per_number_s - issue_s
    shared = figure("B103") / 2  # every byte is read from and written to the same memory
    card = Card(
        device="mps:0",
        name="Apple M2 (MPS)",
        memory_bytes=16 * _GIB,
        flops=figure("B102"),
        bytes_per_s=figure("B103"),
        issue_s=issue_s,
        wait_s=wait_s,
        kernel_s=figure("B019"),
        copy_s=issue_s + wait_s,
        pinned={"h2d": shared, "d2h": shared},
        pageable={"h2d": shared, "d2h": shared},
    )
    return host, card


def _epyc_7763(figure: Figures) -> tuple[Host, None]:
    host = Host(
        model="AMD EPYC 7763",
        cores=64,
        cpus=128,
        memory_bytes=512 * _GIB,
        op_s=_server_op_s(figure),
        flops=_one_core(figure, figure("B118"), 64),
        ram_bytes_per_s=figure("B119"),
    )
    return host, None


MACHINES: dict[str, Callable[[Figures], tuple[Host, Card | None]]] = {
    "rtx3090-ryzen5950x": _rtx_3090_5950x,
    "rtx3060ti-windows": _rtx_3060_ti_windows,
    "rtx4090-ryzen7950x": _rtx_4090_7950x,
    "rtx3060-laptop": _rtx_3060_laptop,
    "gtx1080ti-16-cores": _gtx_1080_ti_16_cores,
    "t4-2-cores": _t4_2_cores,
    "a100-server": _a100_server,
    "h100-server": _h100_server,
    "m2-laptop": _m2_laptop,
    "epyc7763-server": _epyc_7763,
}


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
