"""What a machine is, as far as the speed of training on it goes.

Everything is read from the operating system, nothing is assumed: the CPUs that this process may
use are those of its affinity mask, within the CPU quota of its control groups. Torch is imported
only when accelerators are asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from autoplace.accelerators import DEADLINE_S, Accelerator, Probe, detect_accelerators
from autoplace.cgroups import PROC, SYS, cpu_quota, memory_limit_bytes, read_text
from autoplace.cpus import affinity as cpus_of_mask
from autoplace.cpus import usable
from autoplace.units import significant

__all__ = ["Accelerator", "Machine", "detect_machine"]

# Variables that change how torch and its BLAS run the same call on the CPU ...
_CPU_VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "OMP_WAIT_POLICY",
    "OMP_DYNAMIC",
    "GOMP_CPU_AFFINITY",
    "GOMP_SPINCOUNT",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "MKL_NUM_THREADS",
    "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "OPENBLAS_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "VECLIB_MAXIMUM_THREADS",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
)
# ... and on its devices.
_DEVICE_VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ENABLE_MPS_FALLBACK",
)
_VARIABLES = (*_CPU_VARIABLES, *_DEVICE_VARIABLES)
# Timings depend on the version of each.
_PACKAGES = ("torch", "numpy", "gymnasium", "mujoco", "ale-py", "envpool")
_SHOWN_PACKAGES = (*_PACKAGES, "scikit-learn")

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine as this process may use it.

    Attributes:
        usable_cpus: CPUs to plan for: those of the affinity mask, but no more than the whole CPUs
            of the quota, and at least 1.
        logical_cpus: CPUs in the affinity mask, hardware threads of one core counted apart.
        physical_cores: distinct cores among them.
        cpu_quota: CPUs' worth of time that the control groups allow, ``None`` for no limit.
        cpu_model: what the vendor calls the CPU.
        cpu_power: governor, boost and battery, as far as the system tells: what its clock follows.
        memory_bytes: memory that may be used: the machine's, or the control groups' limit.
        platform: operating system, as in ``sys.platform``.
        arch: instruction set.
        accelerators: what torch reports, usable or not.
        versions: of what timings depend on, sorted by name.
        variables: environment variables that change timings, where they are set, sorted by name.
        complete: whether torch was asked; ``False`` where accelerators, BLAS and driver were left
            out so as not to import it.
    """

    usable_cpus: int
    logical_cpus: int
    physical_cores: int
    cpu_quota: float | None
    cpu_model: str
    memory_bytes: int
    platform: str
    arch: str
    accelerators: tuple[Accelerator, ...] = ()
    versions: Pairs = ()
    variables: Pairs = ()
    complete: bool = True
    cpu_power: str = ""

    @property
    def name(self) -> str:
        """What it is, for people: its CPU and its accelerators."""
        return " + ".join((self.cpu_model, *(card.name for card in self.accelerators)))

    @property
    def key(self) -> str:
        """Names this kind of machine in a file name; the same on every start, safe on any disk."""
        text = f"{self.platform}-{self.arch}-{self.cpu_model}"
        slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80]
        digest = hashlib.sha256(text.encode()).hexdigest()[:6]  # for what the slug leaves out
        return f"{slug}-{self.physical_cores}c-{digest}"

    @property
    def host_fingerprint(self) -> str:
        """Identifies all that timings on the CPU depend on and that is known without torch."""
        return _digest(self._host_facts)

    @property
    def fingerprint(self) -> str:
        """Identifies all that timings depend on, accelerators, BLAS and driver included."""
        return _digest(self.facts)

    @property
    def facts(self) -> dict[str, str]:
        """All that a timing may depend on, by name; what is not there or not set is left out.

        Which timings depend on what is in :mod:`autoplace.sections`.
        """
        return {**self._host_facts, **self._device_facts}

    @property
    def _host_facts(self) -> dict[str, str]:
        """Those that are known without torch."""
        versions = dict(self.versions)
        facts = {
            "platform": self.platform,
            "architecture": self.arch,
            "CPU model": self.cpu_model,
            "usable CPUs": str(self.usable_cpus),
            "logical CPUs": str(self.logical_cpus),
            "physical cores": str(self.physical_cores),
            "CPU quota": "none" if self.cpu_quota is None else f"{self.cpu_quota:g}",
            "CPU power": self.cpu_power,
            # Other kernels leave a machine a few megabytes more or less.
            "memory limit": f"{significant(self.memory_bytes / 2**30, 2)} GiB",
            # A patch release of Python is no reason to measure again.
            "python": ".".join(versions.get("python", "").split(".")[:2]),
            "CPU variables": self._variables_of(_CPU_VARIABLES),
            "device variables": self._variables_of(_DEVICE_VARIABLES),
        }
        facts.update((name, versions.get(name, "")) for name in _PACKAGES)
        return {name: value for name, value in facts.items() if value}

    @property
    def _device_facts(self) -> dict[str, str]:
        # The device name is part of it: measurements call devices by name, so the same cards in
        # another order are another machine.
        facts = {card.device: card.identity for card in self.accelerators}
        facts.update((f"{card.device} power", card.power) for card in self.accelerators)
        known = ("python", *_SHOWN_PACKAGES)
        facts.update((name, value) for name, value in self.versions if name not in known)
        return {name: value for name, value in facts.items() if value}

    def _variables_of(self, names: Collection[str]) -> str:
        return " ".join(f"{name}={value}" for name, value in self.variables if name in names)

    def changes_since(
        self, earlier: Machine, names: Collection[str] | None = None
    ) -> tuple[str, ...]:
        """Which facts are not as they were, each as "name: was X, now Y".

        Accelerators, BLAS and driver are compared where both machines know theirs.

        Args:
            earlier: the machine as it was.
            names: of the facts that matter, all if not given.
        """
        old, new = earlier._host_facts, self._host_facts
        if earlier.complete and self.complete:
            old, new = earlier.facts, self.facts
        return tuple(
            f"{name}: was {old.get(name, 'not set')}, now {new.get(name, 'not set')}"
            for name in (names if names is not None else {**old, **new})
            if old.get(name) != new.get(name)
        )

    def brought_up_to(self, now: Machine) -> Machine:
        """The machine as it is ``now``, with what only torch can tell as it was, where need be."""
        if now.complete:
            return now
        built = {n: v for n, v in self.versions if n not in ("python", *_SHOWN_PACKAGES)}
        return dataclasses.replace(
            now,
            accelerators=self.accelerators,
            versions=tuple(sorted({**built, **dict(now.versions)}.items())),
            complete=self.complete,
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field and both fingerprints."""
        return {
            "usable_cpus": self.usable_cpus,
            "logical_cpus": self.logical_cpus,
            "physical_cores": self.physical_cores,
            "cpu_quota": self.cpu_quota,
            "cpu_model": self.cpu_model,
            "memory_bytes": self.memory_bytes,
            "platform": self.platform,
            "arch": self.arch,
            "accelerators": [accelerator.to_json() for accelerator in self.accelerators],
            "versions": dict(self.versions),
            "variables": dict(self.variables),
            "complete": self.complete,
            "cpu_power": self.cpu_power,
            "fingerprint": self.fingerprint,
            "host_fingerprint": self.host_fingerprint,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Machine:
        """The inverse of :meth:`to_json`; fingerprints are derived anew."""
        values = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
        values["accelerators"] = tuple(map(Accelerator.from_json, values["accelerators"]))
        for name in ("versions", "variables"):
            values[name] = tuple(sorted(values[name].items()))
        return cls(**values)


def _digest(facts: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def detect_machine(
    *,
    accelerators: bool = True,
    probe: Probe | None = None,
    deadline_s: float = DEADLINE_S,
    affinity: Collection[int] | None = None,
    proc_root: Path = PROC,
    sys_root: Path = SYS,
) -> Machine:
    """Describe the machine that this process runs on.

    Args:
        accelerators: whether to ask torch for accelerators and try each; without it torch is not
            imported and no device is touched.
        probe: checks an accelerator in this process, see
            :func:`autoplace.accelerators.detect_accelerators`.
        deadline_s: seconds that each accelerator has to run a small kernel.
        affinity: the CPUs of the affinity mask, read from the system where not given.
        proc_root: where ``/proc`` is.
        sys_root: where ``/sys`` is.
    """
    cpus = sorted(cpus_of_mask() if affinity is None else affinity)
    quota = cpu_quota(proc_root=proc_root, sys_root=sys_root)
    versions = {"python": platform.python_version(), **_package_versions()}
    found: tuple[Accelerator, ...] = ()
    if accelerators:
        found = detect_accelerators(probe=probe, deadline_s=deadline_s)
        versions.update(_torch_versions())
        if any(accelerator.device.startswith("cuda") for accelerator in found):
            versions.update(_driver_version(proc_root))
            found = _with_power_limits(found)
    return Machine(
        usable_cpus=usable(len(cpus), quota),
        logical_cpus=len(cpus),
        physical_cores=_physical_cores(cpus, sys_root),
        cpu_quota=quota,
        cpu_model=_cpu_model(proc_root),
        memory_bytes=_memory_bytes(proc_root, sys_root),
        platform=sys.platform,
        arch=platform.machine() or "unknown",
        accelerators=found,
        versions=tuple(sorted(versions.items())),
        variables=tuple(sorted((n, os.environ[n]) for n in _VARIABLES if n in os.environ)),
        complete=accelerators,
        cpu_power=_cpu_power(cpus[0], sys_root),
    )


# --------------------------------------------------------------------------------------------------
# CPUs and memory


def _physical_cores(cpus: Collection[int], sys_root: Path) -> int:
    """Distinct cores among ``cpus``."""
    cores = {_core(sys_root / "devices" / "system" / "cpu" / f"cpu{cpu}") for cpu in cpus}
    if "" not in cores:
        return len(cores)
    import psutil

    return max(1, min(len(cpus), psutil.cpu_count(logical=False) or len(cpus)))


def _core(folder: Path) -> str:
    """Identifies the core of a CPU, "" where Linux does not say."""
    topology = folder / "topology"
    # Core ids repeat across packages, and on some machines across dies and clusters: the CPUs that
    # share a core identify it best.
    for name in ("core_cpus_list", "thread_siblings_list"):
        if siblings := read_text(topology / name):
            return f"cpus {siblings}"
    if core := read_text(topology / "core_id"):
        return f"package {read_text(topology / 'physical_package_id')} core {core}"
    return ""


def _cpu_power(cpu: int, sys_root: Path) -> str:
    """What the clock of the CPUs follows, "" where the system does not say."""
    import psutil

    folder = sys_root / "devices" / "system" / "cpu"
    policy = folder / f"cpu{cpu}" / "cpufreq"
    follows = [
        read_text(policy / name) for name in ("scaling_governor", "energy_performance_preference")
    ]
    has_no_boost = (
        read_text(folder / "cpufreq" / "boost") == "0"
        or read_text(folder / "intel_pstate" / "no_turbo") == "1"
    )
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    follows += ["without boost"] * has_no_boost
    follows += ["on battery"] * (battery is not None and battery.power_plugged is False)
    return ", ".join(filter(None, follows))


def _memory_bytes(proc_root: Path, sys_root: Path) -> int:
    match = re.search(r"^MemTotal:\s*(\d+) kB", read_text(proc_root / "meminfo"), re.MULTILINE)
    if match is not None:
        total = int(match[1]) * 1024
    else:
        import psutil

        total = int(psutil.virtual_memory().total)
    limit = memory_limit_bytes(proc_root=proc_root, sys_root=sys_root)
    return total if limit is None else min(total, limit)


def _cpu_model(proc_root: Path) -> str:
    """What the vendor calls the CPU, or the most telling name that the system has for it."""
    for name in _cpu_names(proc_root):
        if name.strip():
            return " ".join(name.split())
    return "unknown"


def _cpu_names(proc_root: Path) -> Iterator[str]:
    cpuinfo: dict[str, list[str]] = {}
    for line in read_text(proc_root / "cpuinfo").splitlines():
        field, colon, value = line.partition(":")
        if colon:
            cpuinfo.setdefault(field.strip(), []).append(value.strip())
    if "model name" in cpuinfo:  # x86, and ARM where the kernel knows
        yield cpuinfo["model name"][0]
    if "CPU part" in cpuinfo:  # ARM; cores of different kinds have different parts
        pairs = zip(cpuinfo.get("CPU implementer", []), cpuinfo["CPU part"], strict=False)
        yield " + ".join(sorted({f"ARM implementer {maker} part {part}" for maker, part in pairs}))
    for field in ("cpu model", "cpu", "uarch", "Hardware"):  # MIPS, POWER, RISC-V, older ARM
        yield cpuinfo.get(field, [""])[0]
    if sys.platform == "darwin":
        yield _output_of("sysctl", "-n", "machdep.cpu.brand_string")
    if sys.platform == "win32":
        import winreg

        path = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as entry:
            yield str(winreg.QueryValueEx(entry, "ProcessorNameString")[0])
    yield platform.processor()
    yield platform.machine()


# --------------------------------------------------------------------------------------------------
# Versions


def _package_versions() -> dict[str, str]:
    found = {name: _package_version(name) for name in _SHOWN_PACKAGES}
    return {name: version for name, version in found.items() if version}


def _package_version(name: str) -> str:
    try:
        return metadata.version(name) or ""  # from its metadata: torch is not imported for it
    except metadata.PackageNotFoundError:
        return ""


def _torch_versions() -> dict[str, str]:
    """What torch itself was built with and uses here."""
    import torch

    built = torch.__config__.show()
    found = {"cpu_capability": torch.backends.cpu.get_cpu_capability()}
    for name, pattern in (
        ("blas", r"BLAS_INFO=(\w+)"),
        ("mkl", r"Math Kernel Library Version ([\d.]+)"),
        ("onednn", r"MKL-DNN v(\S+)"),
    ):
        if match := re.search(pattern, built):
            found[name] = match[1]
    for name in ("cuda", "hip", "xpu"):
        if version := getattr(torch.version, name, None):
            found[name] = str(version)
    return found


def _driver_version(proc_root: Path) -> dict[str, str]:
    text = read_text(proc_root / "driver" / "nvidia" / "version")
    match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    version = match[1] if match else ""
    if not version:  # Windows, and containers that hide the file
        query = ("--query-gpu=driver_version", "--format=csv,noheader")
        version = _output_of("nvidia-smi", *query).partition("\n")[0]
    return {"driver": version} if version else {}


def _with_power_limits(cards: tuple[Accelerator, ...]) -> tuple[Accelerator, ...]:
    """The cards with what power each may draw, where the driver's tool tells."""
    query = ("--query-gpu=uuid,power.limit", "--format=csv,noheader")
    rows = (line.split(", ") for line in _output_of("nvidia-smi", *query).splitlines())
    # A slice of a card may go by a UUID of its own; where there is one card, it is that one's.
    limits = {row[0].removeprefix("GPU-"): row[1] for row in rows if len(row) == 2}
    only = next(iter(limits.values())) if len(limits) == 1 else ""
    return tuple(
        dataclasses.replace(card, power=limits.get(card.uuid.removeprefix("GPU-"), only))
        for card in cards
    )


def _output_of(*command: str) -> str:
    """What a system tool prints, "" where it is missing, fails or takes too long."""
    program = shutil.which(command[0])
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *command[1:]], capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace").strip()
