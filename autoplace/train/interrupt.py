"""Ctrl-C and SIGTERM as a request to stop where nothing is half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequested(Exception):  # noqa: N818 - a request, not an error
    """Raised by a sampler between two vector steps once a stop was asked for."""


class StopRequest:
    """Whether the run was asked to stop. A second signal stops it wherever it is."""

    def __init__(self) -> None:
        self.requested = False

    def check(self) -> None:
        """Raise :class:`StopRequested` where a stop was asked for."""
        if self.requested:
            raise StopRequested

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Note the first signal; turn the second into ``KeyboardInterrupt``."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Catch SIGINT and SIGTERM inside the block (in the main thread only, as Python demands)."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, stop.on_signal)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
