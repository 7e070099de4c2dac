"""How devices are named: one parser, which needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autoplace.errors import UsageError

CPU = "cpu"
_TYPES = ("cuda", "mps", "xpu")


def canonical_device(name: str, accelerators: Sequence[str] = ()) -> str:
    """The one spelling of a device name: ``cpu``, or ``type:index`` in lower case.

    ``cuda``, ``CUDA:0`` and ``cuda:0`` are the same device; ``gpu`` is the first accelerator.

    Args:
        name: as a user wrote it.
        accelerators: canonical names of those that are known, whatever their type.

    Raises:
        UsageError: it is not the name of a device.
    """
    match = re.fullmatch(r"([a-z][a-z0-9_]*)(?::(\d+))?", name.strip().lower())
    kind, index = (match.group(1), int(match.group(2) or 0)) if match else ("", 0)
    if kind == CPU and match is not None and match.group(2) in (None, "0"):
        return CPU
    if kind == "gpu":
        kind = accelerators[0].partition(":")[0] if accelerators else _TYPES[0]
    if kind not in {*_TYPES, *(known.partition(":")[0] for known in accelerators)} - {CPU}:
        raise UsageError(f"a device is cpu, cuda[:i], mps or xpu[:i], got {name!r}: name one")
    return f"{kind}:{index}"


def is_accelerator(device: str) -> bool:
    """Whether work on a device (by its canonical name) leaves the CPU."""
    return device != CPU
