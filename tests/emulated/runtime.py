"""The machine that is switched on, which torch's kernels and the device module ask for."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tests.emulated.costs import Work
from tests.emulated.memory import DEVICE_TYPE, DeviceMemory, device_view

if TYPE_CHECKING:
    from tests.emulated.clock import VirtualClock


@dataclass
class Runtime:
    """The machine that is switched on.

    Attributes:
        clock: charged for every operation.
        memories: one per device.
        generators: the default random state of each device, as a CPU generator.
        current_stream: number of the calling thread's stream on a device.
        generator_devices: explicit generators by the address of their state.
    """

    clock: VirtualClock
    memories: list[DeviceMemory]
    generators: list[torch.Generator]
    current_stream: Callable[[int], int]
    generator_devices: MutableMapping[int, Any]


_runtime: Runtime | None = None
_is_forked = False


def set_runtime(runtime: Runtime | None) -> None:
    """Switch a machine on, or off with ``None``."""
    global _runtime
    _runtime = runtime


def is_switched_on() -> bool:
    """Whether a machine is switched on, be it without accelerators."""
    return _runtime is not None


def is_active() -> bool:
    """Whether a machine with at least one accelerator is switched on."""
    return _runtime is not None and bool(_runtime.memories)


def runtime() -> Runtime:
    """The machine that is switched on.

    Raises:
        RuntimeError: there is none, or this process was forked from the one that has it.
    """
    if _is_forked:
        raise RuntimeError(
            "Cannot re-initialize the emulated device in a forked subprocess: use the 'spawn' "
            "start method, and keep accelerators out of worker processes"
        )
    if _runtime is None:
        raise RuntimeError("no emulated machine is switched on: use it inside EmulatedMachine(...)")
    return _runtime


def is_forked() -> bool:
    """Whether this process was forked from one in which a machine was on."""
    return _is_forked


def _after_fork() -> None:
    global _is_forked
    _is_forked = _runtime is not None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def check_index(index: int) -> int:
    """``index``, where the machine has such a device.

    Raises:
        RuntimeError: it has not.
    """
    count = len(runtime().memories)
    if not 0 <= index < count:
        raise RuntimeError(f"invalid device ordinal {DEVICE_TYPE}:{index}: there are {count}")
    return index


def adopt(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A fresh CPU result as a tensor of device ``index``."""
    runtime().memories[index].add(tensor)  # before the relabelling, so that too much is let go
    return device_view(tensor, index)


def charge_kernel(index: int, work: Work) -> None:
    run = runtime()
    run.clock.launch(index, run.current_stream(index), work)
