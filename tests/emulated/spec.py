"""Machines as data: dataclasses of the machine format, and its JSON.

All figures are SI. A key that is left out takes the default written here; an unknown key is an
error, so that a misspelt one is never silently ignored.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MACHINES_FOLDER = Path(__file__).parent / "machines"


class SpecError(ValueError):
    """A machine spec that says something impossible or unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How a matmul of few rows falls short of the full rate: rate x rows / (rows + half).

    Attributes:
        half_rate_rows: rows (the M of an (M, K) @ (K, N)) at which half the rate is reached.
    """

    half_rate_rows: float = 0.0

    def __post_init__(self) -> None:
        _check(self, at_least_zero=("half_rate_rows",))

    def factor(self, rows: float) -> float:
        """The share of the full rate that a matmul of ``rows`` rows reaches."""
        return rows / (rows + self.half_rate_rows) if rows > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSpec:
    """The host.

    Attributes:
        cores: cores that the program may use.
        op_s: fixed host time of one operation.
        flops_per_s: floating-point rate of one core.
        mem_bytes_per_s: memory bandwidth of one core.
        thread_efficiency: p threads give 1 + (p - 1) x this times either rate.
        handoff_s: time from the sending of a message to another worker until it arrives.
        worker_start_s: time until a new worker process runs.
        memory_bytes: host memory.
        efficiency: shape curve of matmuls.
    """

    cores: int = 8
    op_s: float = 3e-6
    flops_per_s: float = 5e10
    mem_bytes_per_s: float = 1.2e10
    thread_efficiency: float = 0.8
    handoff_s: float = 2e-5
    worker_start_s: float = 0.5
    memory_bytes: float = 32e9
    efficiency: Efficiency = field(default_factory=Efficiency)

    def __post_init__(self) -> None:
        _check(
            self,
            positive=("cores", "flops_per_s", "mem_bytes_per_s", "memory_bytes"),
            at_least_zero=("op_s", "thread_efficiency", "handoff_s", "worker_start_s"),
        )

    def speedup(self, threads: int) -> float:
        """How many times one core's rates ``threads`` threads reach."""
        return 1.0 + (threads - 1) * self.thread_efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorSpec:
    """One accelerator.

    A copy bandwidth that is left out follows from those that are given: the way back is as fast as
    the way there, and pageable memory a third as fast as page-locked memory. With unified memory,
    where a page-lock brings nothing, both kinds are as fast, by default half the memory's
    bandwidth, since every byte is read from and written to the same memory.

    Attributes:
        name: what the device calls itself.
        host_dispatch_s: host time to queue one kernel or copy.
        launch_s: device time that passes before each kernel.
        flops_per_s: floating-point rate.
        mem_bytes_per_s: bandwidth of the device's memory.
        memory_bytes: device memory; going beyond it raises ``torch.OutOfMemoryError``.
        unified_memory: whether device and host share one memory: copies from and to ordinary host
            memory can then run in the background, too.
        copy_latency_s: device time that passes before each copy.
        pinned_bytes_per_s: from page-locked host memory to the device.
        pageable_bytes_per_s: from ordinary host memory to the device.
        d2h_pinned_bytes_per_s: from the device to page-locked host memory.
        d2h_pageable_bytes_per_s: from the device to ordinary host memory.
        efficiency: shape curve of matmuls.
    """

    name: str = "Emulated accelerator"
    host_dispatch_s: float = 6e-6
    launch_s: float = 4e-6
    flops_per_s: float = 8e12
    mem_bytes_per_s: float = 4e11
    memory_bytes: float = 8e9
    unified_memory: bool = False
    copy_latency_s: float = 1e-5
    pinned_bytes_per_s: float | None = None
    pageable_bytes_per_s: float | None = None
    d2h_pinned_bytes_per_s: float | None = None
    d2h_pageable_bytes_per_s: float | None = None
    efficiency: Efficiency = field(default_factory=Efficiency)

    def __post_init__(self) -> None:
        pinned = self.pinned_bytes_per_s
        if pinned is None:
            pinned = self.mem_bytes_per_s / 2 if self.unified_memory else 1.2e10
        pageable = self.pageable_bytes_per_s
        if pageable is None:
            pageable = pinned if self.unified_memory else pinned / 3
        back = self.d2h_pinned_bytes_per_s
        back_pageable = self.d2h_pageable_bytes_per_s
        for name, value in (
            ("pinned_bytes_per_s", pinned),
            ("pageable_bytes_per_s", pageable),
            ("d2h_pinned_bytes_per_s", pinned if back is None else back),
            ("d2h_pageable_bytes_per_s", pageable if back_pageable is None else back_pageable),
        ):
            object.__setattr__(self, name, value)
        _check(
            self,
            positive=(
                "flops_per_s",
                "mem_bytes_per_s",
                "memory_bytes",
                "pinned_bytes_per_s",
                "pageable_bytes_per_s",
                "d2h_pinned_bytes_per_s",
                "d2h_pageable_bytes_per_s",
            ),
            at_least_zero=("host_dispatch_s", "launch_s", "copy_latency_s"),
        )

    def bytes_per_s(self, direction: str, *, pinned: bool) -> float:
        """Bandwidth of a copy in ``direction`` (``h2d`` or ``d2h``)."""
        rates = {
            ("h2d", True): self.pinned_bytes_per_s,
            ("h2d", False): self.pageable_bytes_per_s,
            ("d2h", True): self.d2h_pinned_bytes_per_s,
            ("d2h", False): self.d2h_pageable_bytes_per_s,
        }
        rate = rates[direction, pinned]
        assert rate is not None
        return rate


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSpec:
    """What makes times differ from run to run; all of it follows from the seed.

    Attributes:
        lognormal_sigma: spread of the logarithm of a timed stretch.
        outlier_fraction: share of timed stretches that are outliers.
        outlier_factor: how many times as long an outlier takes.
        drift_per_s: relative slowdown per virtual second.
        competing_load: cores' worth of work by other programs, which shares the cores.
        seed: seed of all draws.
    """

    lognormal_sigma: float = 0.0
    outlier_fraction: float = 0.0
    outlier_factor: float = 1.0
    drift_per_s: float = 0.0
    competing_load: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check(
            self,
            positive=("outlier_factor",),
            at_least_zero=("lognormal_sigma", "outlier_fraction", "drift_per_s", "competing_load"),
        )
        if self.outlier_fraction > 1:
            raise SpecError(f"outlier_fraction is at most 1, got {self.outlier_fraction}")

    @property
    def is_off(self) -> bool:
        """Whether the same work always takes the same time."""
        return self == NoiseSpec(outlier_factor=self.outlier_factor, seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """One PPO workload to plan and to run on the machine.

    ``env_step_s`` and ``env_step_spread_s`` are mean and standard deviation of one environment's
    step on one core; the other fields are those of a PPO run.
    """

    name: str = "workload"
    obs_dim: int = 4
    num_actions: int = 2
    continuous: bool = False
    hidden_sizes: tuple[int, ...] = (64, 64)
    num_envs: int = 8
    rollout_steps: int = 128
    minibatch_rows: int = 256
    epochs: int = 4
    env_step_s: float = 2e-5
    env_step_spread_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden_sizes", tuple(self.hidden_sizes))
        _check(
            self,
            positive=("obs_dim", "num_actions", "num_envs", "rollout_steps", "epochs"),
            at_least_zero=("env_step_s", "env_step_spread_s"),
        )
        if not 2 <= self.minibatch_rows <= self.num_envs * self.rollout_steps:
            raise SpecError(
                f"workload {self.name!r}: minibatch_rows is between 2 and the rollout's "
                f"{self.num_envs * self.rollout_steps} rows, got {self.minibatch_rows}"
            )

    @property
    def env_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of ``tests.emulated.env.make_env`` for this workload."""
        return {
            "obs_dim": self.obs_dim,
            "num_actions": self.num_actions,
            "continuous": self.continuous,
            "env_step_s": self.env_step_s,
            "env_step_spread_s": self.env_step_spread_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """A host, its accelerators, its noise, and the workloads to try on it."""

    name: str = "emulated machine"
    cpu: CpuSpec = field(default_factory=CpuSpec)
    accelerators: tuple[AcceleratorSpec, ...] = ()
    noise: NoiseSpec = field(default_factory=NoiseSpec)
    workloads: tuple[WorkloadSpec, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> MachineSpec:
        """The spec that a JSON object holds.

        Raises:
            SpecError: a key is unknown, or a value is of the wrong type or out of range.
        """
        return _build(cls, data, where="machine")

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every key, defaults included."""
        return dataclasses.asdict(self)

    def with_noise(self, **noise: float) -> MachineSpec:
        """A copy with other noise."""
        return dataclasses.replace(self, noise=dataclasses.replace(self.noise, **noise))


def spec_names() -> tuple[str, ...]:
    """Names of the machines that come with the tests."""
    return tuple(sorted(path.stem for path in MACHINES_FOLDER.glob("*.json")))


def load_spec(path: str | Path) -> MachineSpec:
    """The spec in a JSON file, or the one of that name that comes with the tests.

    Raises:
        SpecError: the file does not hold a machine spec.
        FileNotFoundError: there is no such file.
    """
    file = Path(path)
    if file.suffix != ".json":
        file = MACHINES_FOLDER / f"{path}.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise SpecError(f"{file} is not JSON: {error}") from error
    return MachineSpec.from_json(data)


# The types of nested objects: annotations are strings, and evaluating them would buy nothing.
_NESTED: dict[str, tuple[type, bool]] = {
    "cpu": (CpuSpec, False),
    "accelerators": (AcceleratorSpec, True),
    "noise": (NoiseSpec, False),
    "workloads": (WorkloadSpec, True),
    "efficiency": (Efficiency, False),
}


def _build(kind: type, data: Any, *, where: str) -> Any:
    if not isinstance(data, dict):
        raise SpecError(f"{where} is a JSON object, got {data!r}")
    known = [f.name for f in dataclasses.fields(kind)]
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise SpecError(f"{where} has no key {', '.join(unknown)}: it has {', '.join(known)}")
    values: dict[str, Any] = {}
    for key, value in data.items():
        nested, is_list = _NESTED.get(key, (None, False))
        if nested is None:
            values[key] = value
        elif not is_list:
            values[key] = _build(nested, value, where=f"{where}.{key}")
        elif isinstance(value, list):
            values[key] = tuple(
                _build(nested, item, where=f"{where}.{key}[{i}]") for i, item in enumerate(value)
            )
        else:
            raise SpecError(f"{where}.{key} is a list, got {value!r}")
    try:
        return kind(**values)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from error
    except TypeError as error:
        raise SpecError(f"{where} has a value of the wrong type: {error}") from error


def _check(
    spec: object, *, positive: tuple[str, ...] = (), at_least_zero: tuple[str, ...] = ()
) -> None:
    for name in (*positive, *at_least_zero):
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise SpecError(f"{name} is a number, got {value!r}")
        if not math.isfinite(value) or value < 0 or (value == 0 and name in positive):
            rule = "above 0" if name in positive else "0 or more"
            raise SpecError(f"{name} is {rule}, got {value}")
