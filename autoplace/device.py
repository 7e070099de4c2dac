"""The one boundary to torch's devices.

Synchronisation, streams, events, pinned memory, random state and device memory are reached through
this module only, over ``torch.get_device_module(device)``, so that every backend of torch (CUDA,
MPS, XPU, or one registered from outside) takes the same path. The time and what runs beside the
caller are those of :mod:`autoplace.clock`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from threadpoolctl import ThreadpoolController

from autoplace.clock import (
    Clock,
    MessageChannel,
    Spawned,
    charge,
    message_channel,
    now,
    spawn,
    spawns_processes,
    use_clock,
    wait_any,
)
from autoplace.device_names import CPU, canonical_device, is_accelerator
from autoplace.engines import EAGER, GRAPH, NUMPY
from autoplace.errors import DeviceError, EngineError, first_line
from autoplace.shared_array import SharedArray

__all__ = [
    "CPU",
    "Channel",
    "Clock",
    "CopyStream",
    "DeviceTimer",
    "Graph",
    "MessageChannel",
    "Spawned",
    "accelerator_devices",
    "accelerator_type",
    "can_pin",
    "canonical_device",
    "charge",
    "empty_cache",
    "engines_on",
    "has_graphs",
    "host_empty",
    "is_accelerator",
    "memory_bytes",
    "message_channel",
    "now",
    "page_lock",
    "require_device",
    "reuse_freed_memory",
    "seed_device",
    "shared_array",
    "shared_tensor",
    "spawn",
    "spawns_processes",
    "synchronize",
    "torch_threads",
    "use_clock",
    "wait_any",
]


_WARM_UP_RUNS = 3  # of work that is to be recorded


def engines_on(device: str) -> tuple[str, ...]:
    """Engines of steps on a device that are ready at once, the one to know best last.

    A virtual clock tells the time of the eager one only: it sees torch's single operations.
    """
    if spawns_processes():
        if device == CPU:
            return EAGER, NUMPY
        if has_graphs(device):
            return GRAPH, EAGER
    return (EAGER,)


# --------------------------------------------------------------------------------------------------
# Names


def accelerator_type() -> str | None:
    """The type of accelerator that this build of torch sees, or ``None``. Makes no context."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None else None


def accelerator_devices() -> tuple[str, ...]:
    """Canonical names of every accelerator that torch reports, usable or not."""
    kind = accelerator_type()
    if kind is None:
        return ()
    return tuple(f"{kind}:{index}" for index in range(torch.accelerator.device_count()))


def require_device(name: str) -> str:
    """The canonical name of a device that exists here.

    Raises:
        UsageError: the name is not that of a device.
        DeviceError: there is no such device on this machine.
    """
    device = canonical_device(name, accelerator_devices())
    if is_accelerator(device) and device not in accelerator_devices():
        found = ", ".join((CPU, *accelerator_devices()))
        raise DeviceError(f"device {device} is not on this machine, which has {found}: name one")
    return device


# --------------------------------------------------------------------------------------------------
# Execution


def _module(device: str) -> Any:  # noqa: ANN401 - torch's device modules share no type
    return torch.get_device_module(torch.device(device))


def synchronize(device: str) -> None:
    """Wait until everything queued on ``device`` is done; nothing to wait for on the CPU."""
    if is_accelerator(device):
        # The device modules' own synchronize() would wait for whichever device is current.
        torch.accelerator.synchronize(torch.device(device))


def seed_device(device: str, seed: int) -> None:
    """Seed torch's default generator of ``device`` (and of the others of its type)."""
    if is_accelerator(device):
        module = _module(device)
        # manual_seed() means the current device; MPS, which has one device, knows no other.
        getattr(module, "manual_seed_all", module.manual_seed)(seed)
    else:
        torch.default_generator.manual_seed(seed)


def memory_bytes(device: str) -> tuple[int, int] | None:
    """(free, total) bytes of an accelerator's memory, or ``None`` where torch cannot tell."""
    module = _module(device)
    if hasattr(module, "mem_get_info"):
        free, total = module.mem_get_info(torch.device(device))
        return int(free), int(total)
    if hasattr(module, "recommended_max_memory"):  # MPS: unified memory
        total = int(module.recommended_max_memory())
        return total - int(module.driver_allocated_memory()), total
    return None


def empty_cache(device: str) -> None:
    """Give cached device memory back to the driver."""
    if is_accelerator(device) and hasattr(_module(device), "empty_cache"):
        _module(device).empty_cache()


@contextlib.contextmanager
def fast_matmuls() -> Iterator[None]:
    """Let float32 matrix products of an accelerator round their inputs to TF32 inside the block."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


@contextlib.contextmanager
def torch_threads(count: int, engine: str = EAGER) -> Iterator[None]:
    """Run the block with ``count`` threads in torch and numpy, and put the old numbers back.

    Threads that linear algebra has just been given wait for work in a loop, some 20 ms on a core of
    their own. So whoever shares the CPU sets its number once around everything: a block inside that
    asks for the same number changes nothing. Where ``engine`` computes in numpy, torch has one
    thread: its own would wait likewise, and the two pools take the cores from each other.
    """
    in_torch = 1 if engine == NUMPY else count
    previous = torch.get_num_threads()
    libraries = [(library, library.get_num_threads()) for library in _numpy_libraries()]
    if in_torch != previous:
        torch.set_num_threads(in_torch)
    for library, number in libraries:
        if number != count:
            library.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != previous:
            torch.set_num_threads(previous)
        for library, number in libraries:
            if number != count:
                library.set_num_threads(number)


def let_threads_sleep() -> None:
    """Wait until no thread of this process is busy, a quarter of a second at most.

    Threads of linear algebra that have done their part wait for more in a loop: torch's some 5 ms,
    numpy's some 100 ms. Meanwhile a pool of other threads lacks the cores that they hold.
    """
    if not spawns_processes():
        return
    end_s = time.perf_counter() + _LONGEST_LOOP_S
    while True:
        start_s, used_s = time.perf_counter(), time.process_time()
        time.sleep(_TICKS_S)
        now_s = time.perf_counter()
        if time.process_time() - used_s < 0.25 * (now_s - start_s) or now_s >= end_s:
            return


_LONGEST_LOOP_S = 0.25
_TICKS_S = 0.02  # a system counts who was busy every 1 to 16 ms


@functools.cache
def _numpy_libraries() -> tuple[Any, ...]:
    """The linear algebra that numpy has loaded, as far as its threads can be set."""
    controller = ThreadpoolController().select(user_api="blas")
    return tuple(controller.lib_controllers)


# --------------------------------------------------------------------------------------------------
# Crossing between host and device


def can_pin(device: str) -> bool:
    """Whether page-locked host memory speeds up copies to and from ``device``."""
    # MPS shares its memory with the host and has no pinned copies.
    return is_accelerator(device) and not device.startswith("mps")


def host_empty(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, *, pinned_for: str = CPU
) -> torch.Tensor:
    """An uninitialised host tensor, page-locked when copies to ``pinned_for`` gain by it."""
    tensor = torch.empty(tuple(shape), dtype=dtype)
    return tensor.pin_memory() if can_pin(pinned_for) else tensor


# Names of mallopt(3), and the largest block that glibc takes from its heap.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_OF_HEAP = 32 * 2**20


@functools.cache
def reuse_freed_memory() -> None:
    """Let the C library keep host memory that is freed, for what is allocated next.

    By itself glibc gives large blocks and the end of its heap back to the system. Each gradient
    step on images then clears anew the pages of all that it allocates, which takes up to a quarter
    of its time. Other C libraries are left as they are.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_MMAP_THRESHOLD, _LARGEST_OF_HEAP)
            mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def shared_array(
    shape: Sequence[int], dtype: str = "float32", *, pinned_for: str = CPU
) -> SharedArray:
    """Host memory that the caller and what it spawns both see.

    Memory of several processes is page-locked by the one that owns the device: :func:`page_lock`.
    """
    if spawns_processes():
        return SharedArray(shape, dtype)
    memory = host_empty(shape, getattr(torch, dtype), pinned_for=pinned_for)
    return SharedArray(shape, dtype, memory=memory.numpy())


def shared_tensor(shared: SharedArray) -> torch.Tensor:
    """Shared memory as a tensor."""
    return torch.from_numpy(shared.array)


def page_lock(tensor: torch.Tensor, device: str) -> bool:
    """Page-lock shared host memory in place for copies to ``device``; whether it is locked then."""
    if not can_pin(device) or tensor.is_pinned():
        return tensor.is_pinned()
    module = _module(device)
    if not hasattr(module, "cudart"):  # no other backend registers memory that it did not allocate
        return False
    size = tensor.numel() * tensor.element_size()
    failed = int(module.cudart().cudaHostRegister(tensor.data_ptr(), size, 0))
    return failed == 0


class CopyStream:
    """A side stream for copies that overlap other work; a plain in-order queue where none exists.

    Use ``with stream.after_current(): tensor.copy_(source, non_blocking=True)`` and, before the
    copied data is read on the device, ``stream.join()``; before it is read on the host,
    ``stream.synchronize()``.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._module = _module(device) if is_accelerator(device) else None
        self._stream: Any = None
        if self._module is not None and hasattr(self._module, "Stream"):
            self._stream = self._module.Stream(device=torch.device(device))

    @contextlib.contextmanager
    def after_current(self) -> Iterator[None]:
        """Queue the block's device work here, after what the current stream holds already."""
        if self._stream is None or self._module is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream(torch.device(self._device)))
        with self._module.stream(self._stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for what is queued here (the host does not wait)."""
        if self._stream is not None and self._module is not None:
            self._module.current_stream(torch.device(self._device)).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Make the host wait for what is queued here."""
        if self._stream is not None:
            self._stream.synchronize()
        else:
            synchronize(self._device)


class Graph:
    """A stretch of device work that is recorded once and then replayed with a single call.

    The work runs on the same memory each time, must not wait for the device, and takes no decision
    by what it finds there.
    """

    def __init__(self, device: str, work: Callable[[], None]) -> None:
        """Run ``work`` a few times, which lets libraries allocate what they need, and record it.

        Raises:
            EngineError: the device cannot record it.
        """
        if not has_graphs(device):
            raise EngineError(f"{device} cannot record its work: use another --engine")
        module, on = _module(device), torch.device(device)
        try:
            with module.device(on):
                stream = module.Stream(device=on)
                stream.wait_stream(module.current_stream(on))
                with module.stream(stream):
                    for _ in range(_WARM_UP_RUNS):
                        work()
                module.current_stream(on).wait_stream(stream)
                self._graph = _graph_type(module)()
                with module.graph(self._graph):
                    work()
        except RuntimeError as error:
            reason = first_line(error) or type(error).__name__
            raise EngineError(f"{device} cannot record its work ({reason})") from error

    def replay(self) -> None:
        """Queue the work on the current stream."""
        self._graph.replay()


def has_graphs(device: str) -> bool:
    """Whether a device can record work and replay it."""
    return device in accelerator_devices() and _graph_type(_module(device)) is not None


def _graph_type(module: Any) -> Any:  # noqa: ANN401 - torch's graphs share no type
    names = ("CUDAGraph", "XPUGraph") if hasattr(module, "graph") else ()
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


class DeviceTimer:
    """Time that a stretch of queued device work takes, without stopping the host.

    ``start()`` and ``stop()`` mark the current stream; ``elapsed_s()`` waits for the second mark.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._module = _module(device)
        self._start = self._module.Event(enable_timing=True)
        self._stop = self._module.Event(enable_timing=True)

    def start(self) -> None:
        """Mark the start on the current stream."""
        self._record(self._start)

    def stop(self) -> None:
        """Mark the end on the current stream."""
        self._record(self._stop)

    def _record(self, event: Any) -> None:  # noqa: ANN401 - torch's events share no type
        if hasattr(self._module, "current_stream"):
            event.record(self._module.current_stream(self._device))
        else:  # MPS has one stream
            event.record()

    def elapsed_s(self) -> float:
        """Seconds between the two marks; waits until the second has been reached."""
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / 1e3


class Channel:
    """A reusable host-device crossing for one small array per step.

    ``send`` copies a host array into a page-locked buffer and queues its copy to the device;
    ``receive`` brings a device tensor back and waits for it. Both return buffers that the next
    call overwrites.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: str) -> None:
        self._host = host_empty(shape, dtype, pinned_for=device)
        self._array: np.ndarray = self._host.numpy()
        self._on_device = torch.empty(tuple(shape), dtype=dtype, device=device)

    def send(self, array: np.ndarray) -> torch.Tensor:
        """Queue the copy of ``array`` to the device and return the device tensor."""
        # The previous step's receive has waited for the device, so the host buffer is free again.
        np.copyto(self._array, array, casting="same_kind")
        self._on_device.copy_(self._host, non_blocking=True)
        return self._on_device

    def receive(self, tensor: torch.Tensor) -> np.ndarray:
        """Copy ``tensor`` to the host, wait for it, and return it as an array."""
        # A blocking copy is its own wait; no further synchronise is needed.
        self._host.copy_(tensor)
        return self._array
