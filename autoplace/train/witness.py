"""What else went on while stages were timed: evidence for why one is off its prediction."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil

from autoplace import cgroups
from autoplace import device as devices
from autoplace.device_names import CPU
from autoplace.measure.probes import build_probe
from autoplace.measure.timing import Series, run_probe
from autoplace.measurement import Calibration, Measurement
from autoplace.planner.plan import Plan
from autoplace.train.schemes import overlaps

_SENTINEL_S = 2e-4  # of one call: long against the clock, short against an iteration
_SENTINEL_LIMIT_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was seen of the machine during a window of iterations.

    Attributes:
        other_cpus: CPUs' worth of work that other programs did on those that this one may use.
        usable_cpus: how many those are.
        throttled_fraction: share of the time in which the CPU quota held this program up.
        slowdown: by device, how many times the calibrated time a calibrated task takes now, with
            nothing of this run at work; empty where that is not known.
    """

    other_cpus: float = 0.0
    usable_cpus: int = 1
    throttled_fraction: float = 0.0
    slowdown: dict[str, float]


class Witness(Protocol):
    """Watches the machine."""

    def begin(self) -> None:
        """A window begins."""
        ...

    def read(self) -> Evidence:
        """What was seen in the window; called while nothing of the run is at work."""
        ...


class SystemWitness:
    """Reads the operating system's counters, and times sentinels anew."""

    def __init__(self, sentinels: Sequence[Measurement] = ()) -> None:
        self._sentinels = sentinels
        self._cpus = _usable_cpus()
        self.begin()

    def begin(self) -> None:
        """Take the counters' present values."""
        self._begun_s = time.monotonic()
        self._busy_s, self._own_s = _busy_s(self._cpus), _own_s()
        self._throttled_s = cgroups.throttled_s()

    def read(self) -> Evidence:
        """What the counters gained, and how long the sentinels take now."""
        elapsed_s = max(time.monotonic() - self._begun_s, 1e-9)
        others_s = (_busy_s(self._cpus) - self._busy_s) - (_own_s() - self._own_s)
        return Evidence(
            other_cpus=max(0.0, others_s / elapsed_s),
            usable_cpus=len(self._cpus),
            throttled_fraction=(cgroups.throttled_s() - self._throttled_s) / elapsed_s,
            slowdown=retime(self._sentinels),
        )


def choose_sentinels(calibration: Calibration | None, plan: Plan) -> tuple[Measurement, ...]:
    """For each device in use, the calibrated matrix product whose time is handiest to repeat.

    A device that only another process uses is left to it: no second context is made there.
    """
    if calibration is None:
        return ()
    used = [CPU, plan.placement.sample_device]
    if not overlaps(plan.scheme):
        used.append(plan.placement.learn_device)
    chosen = []
    for on in dict.fromkeys(used):
        products = [
            m
            for m in calibration.measurements
            if m.task.op == "matmul"
            and (m.task.device, m.task.threads, m.task.residency) == (on, 1, "resident")
        ]
        if products:
            chosen.append(min(products, key=lambda m: abs(m.median_s - _SENTINEL_S)))
    return tuple(chosen)


def retime(sentinels: Iterable[Measurement]) -> dict[str, float]:
    """How many times its calibrated time each sentinel takes now, by device."""
    return {sentinel.task.device: slowdown_of(sentinel) for sentinel in sentinels}


def slowdown_of(measurement: Measurement, *, time_limit_s: float = _SENTINEL_LIMIT_S) -> float:
    """How many times its calibrated time a task of a single time takes now."""
    task = measurement.task
    probe = build_probe(task)
    series = Series(tasks=probe.tasks)
    try:
        with devices.torch_threads(task.threads, task.engine):
            run_probe(probe, series, time_limit_s=time_limit_s)
    finally:
        probe.close()
    (again,) = series.measurements()
    return again.median_s / measurement.median_s


def _usable_cpus() -> list[int]:
    """Indices of the CPUs in the affinity mask; all of them where there are no masks."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count() or 1))


def _busy_s(cpus: Sequence[int]) -> float:
    """Seconds that the CPUs have worked, for whomever."""
    rows = psutil.cpu_times(percpu=True)
    busy = 0.0
    for cpu in cpus:
        if cpu < len(rows):
            row = rows[cpu]._asdict()
            # Guests are part of user; what a hypervisor gave to others is lost like load.
            free = ("idle", "iowait", "guest", "guest_nice")
            busy += sum(seconds for name, seconds in row.items() if name not in free)
    return busy


def _own_s() -> float:
    """Seconds that this process and all below it have worked."""
    process = psutil.Process()
    total = 0.0
    for member in (process, *process.children(recursive=True)):
        try:
            times = member.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        total += times.user + times.system
    return total
