"""Streams and events of the emulated device, with the interface of ``torch.cuda``'s."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from tests.emulated.memory import DEVICE_TYPE
from tests.emulated.runtime import check_index, runtime

_TORCH_DEVICE_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1)

DeviceLike = torch.device | str | int | None


def device_index(device: DeviceLike = None) -> int:
    """The index that ``device`` names; the first device where it names none.

    Raises:
        RuntimeError: it is no emulated device, or the machine has none of that index.
    """
    if device is None:
        return check_index(0)
    if isinstance(device, int):
        return check_index(device)
    device = torch.device(device)
    if device.type != DEVICE_TYPE:
        raise RuntimeError(f"expected a device of type {DEVICE_TYPE}, got {device}")
    return check_index(device.index or 0)


class Stream(torch.Stream):
    """An in-order queue of work on one device; work of different streams may overlap."""

    _count = 0

    def __new__(
        cls, device: DeviceLike = None, priority: int = 0, *, stream_id: int | None = None
    ) -> Stream:
        index = device_index(device)
        if stream_id is None:
            Stream._count += 1
            stream_id = Stream._count
        return super().__new__(
            cls, stream_id=stream_id, device_index=index, device_type=_TORCH_DEVICE_TYPE
        )

    def __init__(
        self, device: DeviceLike = None, priority: int = 0, *, stream_id: int | None = None
    ) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        """Go on only after what ``other`` holds now."""
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """Go on only after ``event``."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """Mark the end of what is queued here now."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for what is queued here."""
        runtime().clock.synchronize(self.device_index, self.stream_id)

    def query(self) -> bool:
        """Whether everything queued here is done."""
        clock = runtime().clock
        end = clock.devices[self.device_index].free_s(self.stream_id)
        return clock.poll(self.device_index, end)

    def __enter__(self) -> Stream:
        _stacks.entered.append((self.device_index, current_stream(self.device_index)))
        _stacks.current[self.device_index] = self
        return self

    def __exit__(self, *exception: object) -> None:
        index, previous = _stacks.entered.pop()
        _stacks.current[index] = previous


class _Stacks(threading.local):
    """Each thread's current stream per device, and those to go back to."""

    def __init__(self) -> None:
        self.current: dict[int, Stream] = {}
        self.entered: list[tuple[int, Stream]] = []


_stacks = _Stacks()


def forget_streams() -> None:
    """Go back to the default streams, as a new machine has no others."""
    _stacks.current.clear()
    _stacks.entered.clear()


def default_stream(device: DeviceLike = None) -> Stream:
    """The stream that work goes to unless another is chosen."""
    return Stream(device, stream_id=0)


def current_stream(device: DeviceLike = None) -> Stream:
    """The calling thread's stream on ``device``."""
    index = device_index(device)
    stream = _stacks.current.get(index)
    return stream if stream is not None else default_stream(index)


def set_stream(stream: Stream) -> None:
    """Make ``stream`` the calling thread's stream on its device."""
    _stacks.current[stream.device_index] = stream


def current_stream_number(index: int) -> int:
    """Number of the calling thread's stream on device ``index``."""
    stream = _stacks.current.get(index)
    return stream.stream_id if stream is not None else 0


class Event:
    """A mark in a stream."""

    def __init__(
        self,
        device: DeviceLike = None,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        if isinstance(device, bool):  # torch.cuda.Event takes enable_timing first
            device, enable_timing = None, device
        if interprocess:
            raise NotImplementedError("emulated events do not cross processes")
        self._index = device_index(device)
        self._timing = enable_timing
        self._time_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark the end of what ``stream`` (default: the current one) holds now."""
        if stream is None:
            stream = current_stream(self._index)
        self._index = stream.device_index
        self._time_s = runtime().clock.stream_mark(self._index, stream.stream_id)

    def wait(self, stream: Stream | None = None) -> None:
        """Let ``stream`` (default: the current one) go on only after the mark."""
        if stream is None:
            stream = current_stream(self._index)
        if self._time_s is not None:
            runtime().clock.stream_waits(stream.device_index, stream.stream_id, self._time_s)

    def query(self) -> bool:
        """Whether the mark has been reached; true for an event that was never recorded."""
        return self._time_s is None or runtime().clock.poll(self._index, self._time_s)

    def synchronize(self) -> None:
        """Let the host wait for the mark."""
        if self._time_s is not None:
            runtime().clock.wait_until(self._index, self._time_s)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this mark to ``end``.

        Raises:
            ValueError: either event does not time.
            RuntimeError: either is not recorded, or not yet reached.
        """
        if not (self._timing and end._timing):
            raise ValueError("both events must be made with enable_timing=True")
        if self._time_s is None or end._time_s is None:
            raise RuntimeError("both events must be recorded before their time is taken")
        if not (self.query() and end.query()):
            raise RuntimeError("both events must be completed before their time is taken")
        return (end._time_s - self._time_s) * 1e3


def stream(stream: Stream | None) -> contextlib.AbstractContextManager[Any]:
    """A block whose device work is queued on ``stream``."""
    return contextlib.nullcontext() if stream is None else stream


def synchronize(device: DeviceLike = None) -> None:
    """Let the host wait for all streams of ``device``."""
    runtime().clock.synchronize(device_index(device))
