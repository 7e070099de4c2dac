"""The time, and what runs beside the caller. Needs no torch.

The time comes from an injected :class:`Clock`. The real one is ``time.perf_counter``; tests put a
virtual one in its place and know the truth to the nanosecond.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from autoplace.processes import ChildProcess, PipeChannel, wait_any_process


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
    a learner issues thousands. ``target`` and ``args`` are then pickled; memory that both see is a
    :class:`autoplace.shared_array.SharedArray` among them. On a virtual clock it is one of its
    lanes, which starts as late as a process would, unless it is to run ``at_once``. What is
    ``host_only`` sees no accelerator, and its libraries start with one thread.
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
