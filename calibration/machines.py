"""Constants of machines that are not here: published figures, and defaults for the rest.

Each constant is read from `figures.csv`: published (B..), with its source, or of this project's own
reference machine (R..). No constant was chosen by looking at a published training rate. Defaults,
where nobody published a figure for a machine:

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

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

FIGURES = Path(__file__).parent / "figures.csv"
_UNITS = {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "GB/s": 1e9, "G/s": 1e9, "us": 1e-6, "us/op": 1e-6,
          "ms": 1e-3, "x": 1.0, "rows": 1.0, "columns": 1.0}  # fmt: skip
GIB = 2**30


class Figures:
    """Published figures in SI units by id; remembers which were asked for."""

    def __init__(self) -> None:
        with FIGURES.open(encoding="utf-8", newline="") as file:
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
            "policy_step": (figure("R15"), 1.0, 1.0, 1.0),
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
        memory_bytes=gib * GIB,
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
        memory_bytes=64 * GIB,
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
        memory_bytes=32 * GIB,
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
        memory_bytes=64 * GIB,
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
        memory_bytes=16 * GIB,
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
        memory_bytes=64 * GIB,
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
        memory_bytes=12 * GIB,
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
        memory_bytes=1024 * GIB,
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
        memory_bytes=256 * GIB,
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
        memory_bytes=16 * GIB,
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
        memory_bytes=16 * GIB,
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
        memory_bytes=512 * GIB,
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
