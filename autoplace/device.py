"""The one boundary to torch's devices.

Synchronisation, streams, events, pinned memory, random state, device memory and the time itself are
reached through this module only, over ``torch.get_device_module(device)``, so that every backend of
torch (CUDA, MPS, XPU, or one registered from outside) takes the same path.

The time comes from an injected :class:`Clock`. The real one is ``time.perf_counter``; tests put a
virtual one in its place and know the truth to the nanosecond.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from threadpoolctl import ThreadpoolController

from autoplace.device_names import CPU, canonical_device, is_accelerator
from autoplace.engines import EAGER, GRAPH, NUMPY
from autoplace.errors import DeviceError, EngineError, first_line
from autoplace.processes import ChildProcess, PipeChannel, wait_any_process

__all__ = [
    "CPU",
    "Channel",
    "Clock",
    "CopyStream",
    "DeviceTimer",
    "Graph",
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
    "seed_device",
    "shared_empty",
    "spawn",
    "spawns_processes",
    "synchronize",
    "torch_threads",
    "use_clock",
    "wait_any",
]


_WARM_UP_RUNS = 3  # of work that is to be recorded


class MessageChannel(Protocol):
    """A queue between two threads of control."""

    def put(self, item: Any) -> None:  # noqa: ANN401 - whatever is sent
        """Send ``item``, which is lost where the other side has ended."""
        ...

    def get(self, timeout: float | None = None) -> Any:  # noqa: ANN401 - whatever was sent
        """Wait for the next item; ``queue.Empty`` where none arrives in ``timeout`` seconds."""
        ...


class Spawned(Protocol):
    """A thread of control that was started beside the calling one."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def is_alive(self) -> bool:
        """Whether it still runs."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        ...


class Clock(Protocol):
    """Where the time comes from, and with it whatever runs at the same time.

    Attributes:
        processes: whether what is spawned is a process, which sees shared memory only.
    """

    processes: bool

    def now(self) -> float:
        """Seconds since an arbitrary start, as the calling thread sees them."""
        ...

    def charge(self, *, calls: int, flops: float, nbytes: float, seconds: float) -> None:
        """Account for host work that torch's dispatcher cannot see.

        A real clock ignores it, since real work takes real time. A virtual clock adds ``seconds``
        and the cost of ``calls`` operations that do ``flops`` and move ``nbytes``.
        """
        ...

    def spawn(
        self, target: Callable[[], Any], *, name: str, host_only: bool, at_once: bool
    ) -> Spawned:
        """Run ``target`` beside the caller; see :func:`spawn`."""
        ...

    def channel(self) -> MessageChannel:
        """A queue between the caller and what it spawns."""
        ...

    def wait_any(
        self,
        channels: Sequence[Any],
        spawned: Sequence[Any],
        *,
        timeout_s: float | None,
    ) -> Sequence[MessageChannel]:
        """Wait for one of its own channels or of what it spawned; see :func:`wait_any`."""
        ...


class _RealClock:
    processes = True
    now = staticmethod(time.perf_counter)

    def charge(self, *, calls: int, flops: float, nbytes: float, seconds: float) -> None:
        pass

    def spawn(
        self, target: Callable[[], Any], *, name: str, host_only: bool, at_once: bool
    ) -> Spawned:
        return ChildProcess(target, name=name, host_only=host_only)

    def channel(self) -> MessageChannel:
        return PipeChannel()

    wait_any = staticmethod(wait_any_process)


_clock: Clock = _RealClock()


def now() -> float:
    """Seconds on the injected clock."""
    return _clock.now()


def charge(
    *, calls: int = 0, flops: float = 0.0, nbytes: float = 0.0, seconds: float = 0.0
) -> None:
    """Tell the clock of host work that bypasses torch (numpy inference, a compiled graph)."""
    _clock.charge(calls=calls, flops=flops, nbytes=nbytes, seconds=seconds)


def spawn(
    target: Callable[..., Any],
    *args: Any,  # noqa: ANN401
    name: str,
    host_only: bool = False,
    at_once: bool = False,
) -> Spawned:
    """Run ``target(*args)`` at the same time as the caller.

    On the real clock that is a process: two Python threads would take turns at every operation, and
    a learner issues thousands. ``target`` and ``args`` are then pickled, tensors among them must
    come from :func:`shared_empty`. On a virtual clock it is one of its lanes, which starts as late
    as a process would, unless it is to run ``at_once``. What is ``host_only`` sees no accelerator,
    and its libraries start with one thread.
    """
    call = functools.partial(target, *args)
    return _clock.spawn(call, name=name, host_only=host_only, at_once=at_once)


def spawns_processes() -> bool:
    """Whether what is spawned is a process, which takes real time only."""
    return _clock.processes


def message_channel() -> MessageChannel:
    """A queue to or from what is spawned; pass it among the arguments."""
    return _clock.channel()


def wait_any(
    channels: Sequence[MessageChannel],
    spawned: Sequence[Spawned] = (),
    *,
    timeout_s: float | None = None,
) -> Sequence[MessageChannel]:
    """Wait until a channel has an item, something that was spawned has ended, or time is up.

    Returns:
        The channels to look at: those with an item, or whose other side has ended.
    """
    return _clock.wait_any(channels, spawned, timeout_s=timeout_s)


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


@contextlib.contextmanager
def use_clock(clock: Clock | None) -> Iterator[None]:
    """Take the time from ``clock`` inside the block; ``None`` leaves the clock as it is."""
    global _clock
    previous = _clock
    _clock = clock if clock is not None else previous
    try:
        yield
    finally:
        _clock = previous


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


def shared_empty(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, *, pinned_for: str = CPU
) -> torch.Tensor:
    """An uninitialised host tensor that the caller and what it spawns both see.

    Memory of several processes is page-locked by the one that owns the device: :func:`page_lock`.
    """
    if not _clock.processes:
        return host_empty(shape, dtype, pinned_for=pinned_for)
    tensor = torch.empty(tuple(shape), dtype=dtype)
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


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
