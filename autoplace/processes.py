"""Processes of a run, started by ``spawn``: none outlives the one that started it.

A child is started afresh, never forked, so it inherits neither a device context nor a lock. It does
not run the user's ``__main__`` again, so a script without a ``if __name__ == "__main__"`` works. It
leaves Ctrl-C and SIGTERM to its parent, ends when that is gone, however it went (the kernel kills
it on Linux, and a thread in it waits for that everywhere), and is killed by
:meth:`ChildProcess.stop`. What it is started with crosses by pickle, shared memory as a
:class:`autoplace.shared_array.SharedArray`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, util
from typing import Any

_ORPHANED = 1  # exit code of a child whose parent is gone
_POSIX = os.name == "posix"
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HOST_ONLY = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"), ""),
}


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
    """A started process; see :func:`clean_start` for ``host_only``."""

    def __init__(self, target: Callable[[], Any], *, name: str, host_only: bool = False) -> None:
        self.name = name
        args = (_PausedCollector(), target, is_bound())
        self._process = spawn_process(target=_run, args=args, name=name)
        with clean_start(host_only=host_only):
            self._process.start()
        # Runs at the latest when the interpreter exits, before it waits for child processes.
        self._finalizer = util.Finalize(self, _kill, (self._process,), exitpriority=100)

    @property
    def sentinel(self) -> int:
        """What can be waited for until it has ended."""
        return self._process.sentinel

    @property
    def pid(self) -> int:
        """The operating system's number of it."""
        pid = self._process.pid
        assert pid is not None  # it was started
        return pid

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
        self._finalizer.cancel()
        if grace_s:
            self._process.join(grace_s)
        _kill(self._process)


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


def _kill(process: Any) -> None:  # noqa: ANN401 - a process of any context
    process.kill()
    process.join()


def exit_hint(code: int | None) -> str:
    """What may lie behind the exit code of a process that steps environments."""
    if code in (-9, 137):
        return ": look whether memory ran out, which the system answers by SIGKILL"
    return ": look at what the environment does to its process"


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


# --------------------------------------------------------------------------------------------------
# How a child starts and ends


def spawn_process(
    *, target: Callable[..., Any], args: tuple[Any, ...], name: str
) -> multiprocessing.process.BaseProcess:
    """A process that is to be started by ``spawn``, inside of :func:`clean_start`."""
    if _POSIX:
        from autoplace.untracked import UntrackedProcess

        return UntrackedProcess(target=target, args=args, name=name)
    return multiprocessing.get_context("spawn").Process(target=target, args=args, name=name)


class _PausedCollector:
    """The first argument of a child: no garbage is looked for while the others import."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return gc.disable, ()


def _run(_: None, target: Callable[[], Any], bound: bool) -> None:
    gc.enable()
    leave_signals_to_parent()
    end_with_parent(bound)
    target()


def leave_signals_to_parent() -> None:
    """Let Ctrl-C, which reaches every process of the terminal, and SIGTERM pass this one by.

    A handler, unlike SIG_IGN, is not handed on to the programs that this process starts.
    """
    for number in _ENDING_SIGNALS:
        signal.signal(number, lambda *_: None)
    if _POSIX:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)


def is_bound() -> bool:
    """Whether what the calling thread starts may be bound to that thread by the kernel."""
    return threading.current_thread() is threading.main_thread()


def end_with_parent(bound: bool) -> None:
    """End when the parent does, even if it is killed and whatever this process is doing.

    Args:
        bound: what :func:`is_bound` said in the parent.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    if bound and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent.pid:
            os._exit(_ORPHANED)

    def watch() -> None:
        parent.join()
        os._exit(_ORPHANED)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


@contextlib.contextmanager
def clean_start(*, host_only: bool) -> Iterator[None]:
    """Start processes without the user's script; Ctrl-C waits until they leave it to the parent.

    ``spawn`` would run the main module again, with whatever it imports, and fail where it has no
    ``if __name__ == "__main__"``.

    Args:
        host_only: on one thread each, and without devices.
    """
    changed = _HOST_ONLY if host_only else {}
    before = {name: os.environ.get(name) for name in changed}
    mask = None
    if _POSIX:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
    os.environ.update(changed)
    try:
        with without_main():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


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
