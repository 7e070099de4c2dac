"""Processes of a run, started by ``spawn``: none outlives the one that started it.

A child is started afresh, never forked, so it inherits neither a device context nor a lock. It does
not run the user's ``__main__`` again, so a script without a ``if __name__ == "__main__"`` works. It
leaves Ctrl-C and SIGTERM to its parent, ends itself when that is gone, however it went, and is
killed by :meth:`ChildProcess.stop`. Tensors that it is started with must be in shared memory. On
Linux that has no name from the start: nothing is left in ``/dev/shm``, whatever ends the run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any

_ORPHANED = 1  # exit code of a child whose parent is gone


class PipeChannel:
    """A queue from one process to another, for small picklable messages.

    A process that has begun to read or to write closes its copy of the other end: so an item that
    is cut short by the death of its writer is noticed, instead of being waited for.

    Attributes:
        reader: where items arrive.
    """

    def __init__(self) -> None:
        self.reader, self._writer = multiprocessing.Pipe(duplex=False)

    def put(self, item: Any) -> None:  # noqa: ANN401 - whatever is sent
        """Send ``item``; it fits into the pipe, or this waits until it is read.

        It is lost where the other side has ended.
        """
        self.reader.close()
        with contextlib.suppress(OSError):
            self._writer.send(item)

    def get(self, timeout: float | None = None) -> Any:  # noqa: ANN401 - whatever was sent
        """Wait for the next item.

        Raises:
            queue.Empty: none arrived within ``timeout`` seconds, or none ever will.
        """
        self._writer.close()
        try:
            if self.reader.poll(timeout):
                return self.reader.recv()
        except (EOFError, OSError):  # the other side has ended, perhaps within an item
            pass
        raise queue.Empty

    def close(self) -> None:
        """Close this process's ends."""
        self.reader.close()
        self._writer.close()


class ChildProcess:
    """A started process."""

    def __init__(self, target: Callable[[], Any], *, name: str) -> None:
        import torch.multiprocessing as torch_processes  # teaches pickle to share tensors

        context = torch_processes.get_context("spawn")
        self.name = name
        self._process = context.Process(target=_run, args=(target,), name=name, daemon=True)
        with without_main():
            self._process.start()

    @property
    def sentinel(self) -> int:
        """What can be waited for until it has ended."""
        return self._process.sentinel

    @property
    def pid(self) -> int | None:
        """The operating system's number of it."""
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """How it ended: its exit code, minus the signal that killed it, ``None`` while it runs."""
        return self._process.exitcode

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self._process.join(timeout)

    def stop(self, grace_s: float = 0.0) -> None:
        """Wait ``grace_s`` for its end, and kill it if need be."""
        if grace_s:
            self._process.join(grace_s)
        self._process.kill()
        self._process.join()


def wait_any_process(
    channels: Sequence[PipeChannel],
    spawned: Sequence[ChildProcess],
    *,
    timeout_s: float | None,
) -> list[PipeChannel]:
    """Wait until a channel has an item or has lost its writer, a process has ended, or time is up.

    Returns:
        The channels that have an item or have lost their writer.
    """
    waited: list[Any] = [channel.reader for channel in channels]
    ready = connection.wait([*waited, *(process.sentinel for process in spawned)], timeout_s)
    return [channel for channel in channels if channel.reader in ready]


def echo(inbound: Any, outbound: Any) -> None:  # noqa: ANN401 - channels of any clock
    """Send back what arrives, until that is ``None``."""
    while (item := inbound.get()) is not None:
        outbound.put(item)


def describe_exit(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "is still running"
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name} (exit code {code})"
    return f"was killed by signal {-code} (exit code {code})"


class RemoteTraceback(Exception):  # noqa: N818 - the cause of an error, never raised by itself
    """The traceback of an error in another process, as the cause of that error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def pack_error(error: BaseException) -> tuple[BaseException, str]:
    """An error as it can cross to another process, and its traceback as text."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever the error's own constructor wants
        return RuntimeError(f"{type(error).__name__}: {error}"), text
    return error, text


def raise_packed(packed: tuple[BaseException, str]) -> None:
    """Raise an error that came from another process, with its own traceback as the cause."""
    error, text = packed
    raise error from RemoteTraceback(text)


def _run(target: Callable[[], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent watch", daemon=True).start()
    target()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(_ORPHANED)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Let a process that starts inside the block not run the main module once more."""
    main = sys.modules["__main__"]
    missing = object()
    hidden = {"__spec__": None, "__file__": missing}
    before = {name: getattr(main, name, missing) for name in hidden}
    main.__spec__ = None
    if before["__file__"] is not missing:
        del main.__file__
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not missing:
                setattr(main, name, value)
