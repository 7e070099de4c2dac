"""The device module ``torch.emu``, and what has to be patched in torch for it.

Registered once per process and never taken back: the name ``emu``, its dispatcher kernels, and two
CPU kernels that know which host memory is page-locked. Patched while a machine is switched on, and
put back afterwards: see :func:`patched_torch`. Because of both, tests that use the device run in a
process of their own.

Known limits, each of which fails loudly:

- ``set_device`` takes the first device only: torch resolves a name without an index in C++, where
  this route has no say. Name devices in full, ``emu:1``.
- ``torch.empty(..., pin_memory=True)`` and ``UntypedStorage(n, device="emu")`` need an allocator in
  C++; use ``tensor.pin_memory()`` and ``torch.empty(n, dtype=torch.uint8, device="emu")``.
- ``parameter.data = tensor on another device`` is refused by torch. ``Module.to`` swaps the
  contents of parameters instead, which keeps their identity but fails while an autograd graph
  still holds them.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.emulated import dispatch
from tests.emulated.autocast import register_autocast
from tests.emulated.memory import DEVICE_TYPE, device_view
from tests.emulated.runtime import is_active, is_forked, runtime
from tests.emulated.streams import (
    DeviceLike,
    Event,
    Stream,
    current_stream,
    default_stream,
    device_index,
    set_stream,
    stream,
    synchronize,
)

# --------------------------------------------------------------------------------------------------
# Random state


class _DeviceGenerator(torch.Generator):
    """Random state of a device: a CPU generator that says it is elsewhere."""

    def __new__(cls, device: DeviceLike) -> _DeviceGenerator:
        return super().__new__(cls)

    def __init__(self, device: DeviceLike) -> None:
        self._index = device_index(device)
        runtime().generator_devices[self._cdata] = self

    @property
    def device(self) -> torch.device:
        return torch.device(DEVICE_TYPE, self._index)


def manual_seed(seed: int) -> None:
    """Seed the current device, which is the first."""
    runtime().generators[0].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed every device."""
    if is_active():
        for generator in runtime().generators:
            generator.manual_seed(seed)


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """Random state of ``device``."""
    return runtime().generators[device_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: DeviceLike = None) -> None:
    """Go back to a random state of ``device``."""
    runtime().generators[device_index(device)].set_state(state)


# --------------------------------------------------------------------------------------------------
# Devices and memory


def device_count() -> int:
    """Number of accelerators of the machine that is switched on."""
    return len(runtime().memories) if is_active() else 0


def set_device(device: DeviceLike) -> None:
    """Choose the current device: only the first can be.

    Raises:
        NotImplementedError: another one is asked for.
    """
    if device_index(device):
        raise NotImplementedError(
            f"the emulated machine's current device is always {DEVICE_TYPE}:0: name "
            f"{DEVICE_TYPE}:{device_index(device)} wherever it is meant"
        )


class _CurrentDevice:
    """``with torch.emu.device(0)``."""

    def __init__(self, device: DeviceLike) -> None:
        set_device(device)

    def __enter__(self) -> _CurrentDevice:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """(free, total) bytes of ``device``."""
    memory = runtime().memories[device_index(device)]
    return memory.total_bytes - memory.allocated_bytes, memory.total_bytes


def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes that tensors hold on ``device``."""
    return runtime().memories[device_index(device)].allocated_bytes


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The most bytes that tensors have held on ``device`` since the last reset."""
    return runtime().memories[device_index(device)].peak_bytes


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Start :func:`max_memory_allocated` anew."""
    memory = runtime().memories[device_index(device)]
    memory.peak_bytes = memory.allocated_bytes


def get_device_name(device: DeviceLike = None) -> str:
    """What the device calls itself."""
    return runtime().clock.devices[device_index(device)].spec.name


def _make_module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{DEVICE_TYPE}")
    for function in (
        current_stream,
        default_stream,
        device_count,
        get_device_name,
        get_rng_state,
        manual_seed,
        manual_seed_all,
        max_memory_allocated,
        mem_get_info,
        memory_allocated,
        reset_peak_memory_stats,
        set_device,
        set_rng_state,
        set_stream,
        stream,
        synchronize,
    ):
        setattr(module, function.__name__, function)
    constants: dict[str, Callable[..., Any]] = {
        "is_available": is_active,
        "is_initialized": is_active,
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
        "_is_in_bad_fork": is_forked,
        "_lazy_init": lambda: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda *_: True,
    }
    for name, function in constants.items():
        setattr(module, name, function)
    module.Stream, module.Event, module.device = Stream, Event, _CurrentDevice
    return module


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """What torch's C++ asks of an accelerator."""

    def is_available(self) -> bool:
        return is_active()

    def has_primary_context(self, index: int) -> bool:
        return is_active()

    def is_built(self) -> bool:
        return True


# --------------------------------------------------------------------------------------------------
# Installation


_is_registered = False


def register() -> None:
    """Make the device known to torch; does nothing the second time.

    Raises:
        RuntimeError: another extension has taken torch's one extension device.
    """
    global _is_registered
    if _is_registered:
        return
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise RuntimeError(f"torch's extension device is taken in this process, by {taken!r}")
    _setup_privateuseone_for_python_backend(
        DEVICE_TYPE, backend_module=_make_module(), hook=_Hooks()
    )
    dispatch.register_kernels()
    register_autocast()
    # Before torch's own entry for extension devices, which wants a C++ allocator.
    torch.serialization.register_package(9, _storage_location, _storage_to_location)
    _is_registered = True


def _storage_location(storage: torch.UntypedStorage) -> str | None:
    device = storage.device
    return f"{DEVICE_TYPE}:{device.index or 0}" if device.type == DEVICE_TYPE else None


def _storage_to_location(
    storage: torch.UntypedStorage, location: str
) -> torch.UntypedStorage | None:
    if not location.startswith(DEVICE_TYPE):
        return None
    index = device_index(location)
    copied = torch.empty(0, dtype=torch.uint8).set_(storage).clone()
    runtime().memories[index].add(copied)
    return device_view(copied, index).untyped_storage()


def _names_emulated(device: DeviceLike) -> bool:
    if device is None or isinstance(device, int):
        return False
    return torch.device(device).type == DEVICE_TYPE


def _routed(original: type, replacement: Callable[..., Any], *, by_default: bool) -> type:
    """A stand-in for ``original`` that makes a ``replacement`` for the emulated device.

    ``isinstance`` and ``issubclass`` go on meaning the original.
    """

    class Routing(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if "stream_id" in kwargs:
                return original(*args, **kwargs)
            device = kwargs.get("device", args[0] if args else None)
            missing = device is None or isinstance(device, bool)
            if (missing and by_default) or (not missing and _names_emulated(device)):
                return replacement(*args, **kwargs)
            return original(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            kinds = (original, replacement) if isinstance(replacement, type) else original
            return isinstance(instance, kinds)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original)

    return Routing(original.__name__, (), {"__doc__": original.__doc__})


def _guarded_storage(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        # torch has no allocator for the device and would follow a null pointer.
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == DEVICE_TYPE:
            raise NotImplementedError(
                f"UntypedStorage(..., device={str(device)!r}) needs an allocator in C++: use "
                f'torch.empty(n, dtype=torch.uint8, device="{device}").untyped_storage()'
            )
        return original(cls, *args, **kwargs)

    return make


@contextlib.contextmanager
def patched_torch() -> Iterator[None]:
    """Let torch's own entry points reach the machine inside the block.

    Patched: ``torch.Generator``, ``torch.Stream`` and ``torch.Event`` (for this device only), the
    functions of ``torch.accelerator``, ``torch.get_num_threads`` and ``set_num_threads`` (each lane
    has its own number, and none is real), the guard of ``UntypedStorage``, and the flag that makes
    ``Module.to`` keep its parameters.
    """
    clock = runtime().clock
    has_device = is_active()
    patches: list[tuple[Any, str, Any]] = [
        (torch, "get_num_threads", lambda: clock.threads),
        (torch, "set_num_threads", lambda count: setattr(clock, "threads", count)),
        (torch, "Generator", _routed(torch.Generator, _DeviceGenerator, by_default=False)),
        (torch, "Stream", _routed(torch.Stream, Stream, by_default=has_device)),
        (torch, "Event", _routed(torch.Event, Event, by_default=has_device)),
        (torch.UntypedStorage, "__new__", _guarded_storage(torch.UntypedStorage.__new__)),
    ]
    accelerator: dict[str, Callable[..., Any]] = {
        "synchronize": synchronize,
        "current_stream": current_stream,
        "set_stream": set_stream,
        "current_device_index": lambda: 0,
        "set_device_index": set_device,
        "device_index": _CurrentDevice,
        "empty_cache": lambda: None,
        "get_memory_info": mem_get_info,
        "memory_allocated": memory_allocated,
        "max_memory_allocated": max_memory_allocated,
        "reset_peak_memory_stats": reset_peak_memory_stats,
    }
    if has_device:
        patches += [
            (torch.accelerator, name, function)
            for name, function in accelerator.items()
            if hasattr(torch.accelerator, name)
        ]
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    real_threads = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        stack.callback(torch.set_num_threads, real_threads)
        # One real thread: sums are then in the same order however many cores the host has.
        torch.set_num_threads(1)
        torch.__future__.set_swap_module_params_on_conversion(True)
        for owner, name, value in patches:
            own = owner.__dict__.get(name, _MISSING)
            if own is _MISSING:
                stack.callback(delattr, owner, name)
            else:
                stack.callback(setattr, owner, name, own)
            setattr(owner, name, value)
        yield


_MISSING = object()
