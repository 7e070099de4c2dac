"""The accelerators that torch reports, and whether each of them really works.

That torch reports a device says little: the wheel may hold no kernel for it, the driver may hang.
So every device runs a small real kernel, in a child process with a deadline, which also reads the
device's properties: this process makes no context on it and stays safe to fork. Devices that exist
in this process alone (registered from Python) are checked here.

The module imports torch only when something is looked for.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from autoplace.errors import first_line
from autoplace.units import significant

DEADLINE_S = 60.0
_MARK = "autoplace-probe "  # starts each line of the child that is meant for its parent
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from autoplace.accelerators import probe_main; probe_main(sys.argv[1])"
)
_MAX_CHILDREN = 4  # each imports torch

Probe = Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One accelerator by identity.

    Attributes:
        device: canonical name in this process, for example ``cuda:0``.
        name: what the vendor calls it.
        uuid: identity that does not depend on the order in which devices are visible.
        memory_bytes: its total memory, 0 where torch cannot tell.
        usable: whether a small real kernel ran on it.
        reason: why it is not usable, ``None`` where it is.
        compute_units: its multiprocessors, a slice's own, 0 where torch cannot tell.
        power: what limits its clock, "" where it is not known.
    """

    device: str
    name: str
    uuid: str
    memory_bytes: int
    usable: bool
    reason: str | None = None
    compute_units: int = 0
    power: str = ""

    @property
    def identity(self) -> str:
        """What its timings depend on: which card or slice of one, and whether it works."""
        units = f", {self.compute_units} units" * bool(self.compute_units)
        size = f"{significant(self.memory_bytes / 2**30)} GiB{units}"
        return f"{self.name} {self.uuid} ({size}){' (unusable)' * (not self.usable)}"

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Accelerator:
        """The inverse of :meth:`to_json`."""
        return cls(**{f.name: row[f.name] for f in dataclasses.fields(cls) if f.name in row})


def detect_accelerators(
    *, probe: Probe | None = None, deadline_s: float = DEADLINE_S
) -> tuple[Accelerator, ...]:
    """Every accelerator that torch reports, usable or not.

    Args:
        probe: a check that runs in this process instead of the kernel in a child: it takes a
            device name and returns why the device does not work, "" where it does.
        deadline_s: seconds that a child process may take, its import of torch included.
    """
    from autoplace import device

    names = device.accelerator_devices()
    if not names:
        return ()
    if probe is None and _is_of_this_process(names[0]):
        probe = check_kernel
    if probe is not None:
        return tuple(_check_here(name, probe) for name in names)
    with ThreadPoolExecutor(min(_MAX_CHILDREN, len(names))) as pool:
        return tuple(pool.map(lambda name: _check_in_child(name, deadline_s), names))


def _is_of_this_process(name: str) -> bool:
    """Whether a child process would not see the device: registered here, by no installed plugin."""
    import torch

    if name.partition(":")[0] != torch._C._get_privateuse1_backend_name():
        return False
    return not metadata.entry_points(group="torch.backends")


# --------------------------------------------------------------------------------------------------
# The check


def check_kernel(name: str) -> str:
    """Run a small real kernel on a device: why it does not work, "" where it does."""
    import torch

    try:
        host = torch.arange(64.0 * 64).reshape(64, 64) / 4096 - 0.5
        there = host.to(name)
        found = torch.tanh(there @ there).cpu()  # a copy to the host waits for the device
    except Exception as error:
        return _explain(error, name)
    if not torch.allclose(found, torch.tanh(host @ host), atol=1e-2):  # TF32 errs by 1e-3
        return "a small matrix product on it gives wrong numbers"
    return ""


def _explain(error: Exception, name: str) -> str:
    """One line on why a kernel failed; what torch was built for where that is the cause."""
    import torch

    reason = first_line(error) or type(error).__name__
    if "no kernel image" not in reason.lower():
        return reason
    module = torch.get_device_module(torch.device(name))
    try:
        major, minor = module.get_device_capability(torch.device(name))
        built_for = " ".join(module.get_arch_list())
    except Exception:
        return reason
    return f"{reason}: its capability is {major}.{minor}, this torch is built for {built_for}"


def _describe(name: str) -> dict[str, Any]:
    """Name, UUID and memory of a device, as far as torch can tell."""
    import torch

    from autoplace import device

    module = torch.get_device_module(torch.device(name))
    kind, _, index = name.partition(":")
    get_properties = getattr(module, "get_device_properties", None)
    properties = get_properties(torch.device(name)) if get_properties is not None else None
    label = getattr(properties, "name", None)
    if label is None and kind == "mps":
        get_name = getattr(torch.backends.mps, "get_name", None)  # not in every torch
        label = get_name() if get_name is not None else "Apple GPU"
    label = str(label or f"{kind} device")
    memory = getattr(properties, "total_memory", None)
    if memory is None:
        memory = (device.memory_bytes(name) or (0, 0))[1]
    return {
        "name": label,
        "uuid": _uuid(properties) or f"{kind}-{label}-{_place(properties) or index}",
        "memory_bytes": int(memory),
        "compute_units": int(_compute_units(properties)),
    }


def _compute_units(properties: object) -> int:
    names = ("multi_processor_count", "max_compute_units")
    return next((getattr(properties, name) for name in names if hasattr(properties, name)), 0)


def _uuid(properties: object) -> str:
    uuid = getattr(properties, "uuid", None)
    if isinstance(uuid, (bytes, list, tuple)):
        return bytes(uuid).hex()
    return str(uuid) if uuid is not None else ""


def _place(properties: object) -> str:
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    numbers = [getattr(properties, name, None) for name in names]
    return "pci-" + "-".join(map(str, numbers)) if numbers[1] is not None else ""


def _unknown(name: str) -> dict[str, Any]:
    kind, _, index = name.partition(":")
    return {"name": f"{kind} device", "uuid": f"{kind}-unknown-{index}", "memory_bytes": 0}


def _check_here(name: str, probe: Probe) -> Accelerator:
    try:
        facts = _describe(name)
    except Exception as error:
        return Accelerator(
            device=name, usable=False, reason=_explain(error, name), **_unknown(name)
        )
    reason = probe(name)
    return Accelerator(device=name, usable=not reason, reason=reason or None, **facts)


# --------------------------------------------------------------------------------------------------
# The child process


def probe_main(name: str) -> None:
    """Describe and check one device on standard output, each as soon as it is known."""
    for step in (lambda: _describe(name), lambda: {"reason": check_kernel(name)}):
        sys.stdout.write(f"{_MARK}{json.dumps(step())}\n")
        sys.stdout.flush()


def _child_command(name: str) -> list[str]:
    return [sys.executable, "-c", _CHILD, name, json.dumps(sys.path)]


def _check_in_child(name: str, deadline_s: float) -> Accelerator:
    try:
        child = subprocess.Popen(
            _child_command(name),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        why = f"no process could be started to check it: {error.strerror or error}"
        return Accelerator(device=name, usable=False, reason=why, **_unknown(name))
    in_time = True
    try:
        output, errors = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        in_time = False
        child.kill()
        try:
            output, errors = child.communicate(timeout=5)
        except subprocess.TimeoutExpired as still:  # stuck inside the driver, where no signal helps
            output, errors = _text(still.stdout), ""
    facts = _unknown(name)
    reason: str | None = None
    for line in output.splitlines(keepends=True):
        if line.startswith(_MARK) and line.endswith("\n"):  # a killed child may leave half a line
            row = json.loads(line[len(_MARK) :])
            reason = row.pop("reason", reason)
            facts.update(row)
    if reason is None and not in_time:
        reason = f"a small kernel on it was not done within the deadline of {deadline_s:g} s"
    elif reason is None:
        last = [line.strip() for line in errors.splitlines() if line.strip()][-1:]
        reason = last[0] if last else f"checking it ended with exit status {child.returncode}"
    return Accelerator(device=name, usable=not reason, reason=reason or None, **facts)


def _text(output: str | bytes | None) -> str:
    return output.decode("utf-8", "replace") if isinstance(output, bytes) else output or ""
