"""Workers: functions that run beside the trainer, started, waited for and supervised as one.

A worker is a process of its own (in tests also a thread), started by ``spawn`` on every system: it
inherits neither a device context nor a lock. Between it and the trainer there is a channel of
one-byte signals; what is large lies in shared memory that has no name, so that nothing is left
behind whatever ends the run. Either side looks for a signal awake before it sleeps, where there are
cores for all: a vector step is often shorter than a few wake-ups.

How each end comes about:

- A worker that raises sends its traceback, which becomes the cause of an :class:`EnvError` here.
- A worker that dies closes its channel; it is named with its exit code.
- A worker that does not answer within its deadline is killed and named.
- A worker that is lost may be started anew; what it was doing is lost.
- A trainer that dies, even by ``kill -9``, takes its workers along: the kernel kills them (Linux),
  and a thread in each waits for the trainer's end (everywhere).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import select
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import util
from typing import Any, NoReturn, Protocol

import cloudpickle
import numpy as np

from autoplace.errors import EnvError, first_line
from autoplace.processes import (
    RemoteTraceback,
    clean_start,
    describe_exit,
    end_with_parent,
    exit_hint,
    is_bound,
    leave_signals_to_parent,
    spawn_process,
)

DEADLINE_S = 120.0
START_DEADLINE_S = 180.0  # imports from a cold disk take long
_GRACE_S = 5.0  # for a worker to close what it holds
# Seconds of a wait that are spent awake: a few times what falling asleep and being woken up take.
AWAKE_S = 2e-4

_ENDED = "the environment workers have ended: make the environments anew"

READY, FAILED, QUIT = b"+", b"!", b"q"
_POSIX = os.name == "posix"
_yield_core: Callable[[], object] = getattr(os, "sched_yield", functools.partial(time.sleep, 0))
_spawn = multiprocessing.get_context("spawn")

Target = Callable[["Channel", Any, "SharedArrays"], None]


class NotPicklableError(EnvError):
    """What a worker needs cannot be sent to it."""


class WorkerLostError(EnvError):
    """A worker died, hung or leaked.

    Attributes:
        index: which.
    """

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class Channel:
    """One end of a two-way channel: one-byte signals, and messages that follow one."""

    def __init__(self, connection: Any) -> None:  # noqa: ANN401 - Connection, generic of late
        self._connection = connection
        self._fd: int = connection.fileno() if _POSIX else -1
        self._deadline_s: float | None = None
        self._has_signal: Callable[[], object] = connection.poll
        if _POSIX:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            self._has_signal = functools.partial(poll.poll, 0)

    def set_deadline(self, deadline_s: float | None) -> None:
        """How long :meth:`wait` waits."""
        self._deadline_s = deadline_s
        if _POSIX:
            # The kernel keeps the time, so that a wait is a single system call.
            whole, part = divmod(deadline_s or 0.0, 1.0)
            with socket.socket(fileno=os.dup(self._fd)) as duplicate:
                limit = struct.pack("ll", int(whole), int(part * 1e6))
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def signal(self, byte: bytes) -> None:
        """Wake the other end up."""
        if _POSIX:
            os.write(self._fd, byte)
        else:
            self._connection.send_bytes(byte)

    def wait(self, *, awake_s: float = AWAKE_S) -> bytes:
        """The next signal, for which it stays awake for ``awake_s`` at first.

        Between two looks the core is left to whoever else has work for it.

        Raises:
            EOFError: the other end is gone.
            TimeoutError: the deadline has passed.
        """
        sleep_s = time.perf_counter() + awake_s
        while not self._has_signal() and time.perf_counter() < sleep_s:
            _yield_core()
        if _POSIX:
            try:
                byte = os.read(self._fd, 1)
            except BlockingIOError:
                raise TimeoutError from None
            if not byte:
                raise EOFError
            return byte
        if not self._connection.poll(self._deadline_s):
            raise TimeoutError
        received: bytes = self._connection.recv_bytes()
        return received

    def send(self, message: bytes) -> None:
        """Send a message; the other end must be told by a signal before."""
        self._connection.send_bytes(message)

    def receive(self) -> bytes:
        """The message that follows a signal."""
        received: bytes = self._connection.recv_bytes()
        return received

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


class _Handle(Protocol):
    """What a process and a thread have in common."""

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


class Workers:
    """Workers that run the same function, each with an argument of its own.

    The function is called as ``target(channel, argument, shared)``. It signals :data:`READY` once
    it can be used, answers signals until it reads :data:`QUIT`, and returns.

    Attributes:
        names: of the workers, for messages.
    """

    def __init__(
        self,
        target: Target,
        arguments: Sequence[Any],
        *,
        names: Sequence[str],
        shared: SharedArrays | None = None,
        deadline_s: float = DEADLINE_S,
        start_deadline_s: float = START_DEADLINE_S,
        may_restart: bool = False,
        awake_s: float = AWAKE_S,
        use_threads: bool = False,
    ) -> None:
        """Start them all, and wait until each is ready.

        Args:
            target: what a worker runs.
            arguments: what each is given, sent by cloudpickle.
            names: how messages call them.
            shared: arrays that all workers and the caller see.
            deadline_s: how long an answer may take until a worker counts as hung.
            start_deadline_s: how long it may take to become ready.
            may_restart: let the others live when one is lost, for :meth:`restart`.
            awake_s: how long the caller stays awake in a wait before it sleeps.
            use_threads: run them as threads of this process; such cannot be killed.

        Raises:
            NotPicklableError: a target or an argument cannot be sent.
            EnvError: a worker failed to start.
        """
        self.names = list(names)
        self._deadline_s, self._start_deadline_s = deadline_s, start_deadline_s
        self._may_restart, self._use_threads = may_restart, use_threads
        self._awake_s = awake_s
        self._shared = shared or SharedArrays({})
        self._payloads = [pickled((target, argument), str(argument)) for argument in arguments]
        self._channels: list[Channel] = []
        self._handles: list[_Handle] = []
        # Runs at the latest when the interpreter exits, before it waits for child processes.
        self._finalizer = util.Finalize(
            self, _stop, (self._channels, self._handles), exitpriority=100
        )
        try:
            for name, payload in zip(self.names, self._payloads, strict=True):
                channel, handle = self._start(name, payload)
                self._channels.append(channel)
                self._handles.append(handle)
            for index in range(len(self)):
                self._await_ready(index)
        except BaseException:
            self.close(grace_s=0.5)
            raise

    def _start(self, name: str, payload: bytes) -> tuple[Channel, _Handle]:
        here, there = _spawn.Pipe()
        handle: Any
        if self._use_threads:
            args = (there, payload, self._shared)
            handle = threading.Thread(target=_serve, args=args, name=name, daemon=True)
            handle.start()
        else:
            handle = spawn_process(
                target=_worker_main, args=(there, payload, self._shared, is_bound()), name=name
            )
            with clean_start(host_only=True):
                handle.start()
            there.close()  # or its end would not be noticed
        return Channel(here), handle

    def _await_ready(self, index: int) -> None:
        channel = self._channels[index]
        channel.set_deadline(self._start_deadline_s)
        self.wait(index, deadline_s=self._start_deadline_s)
        channel.set_deadline(self._deadline_s)

    def restart(self, index: int) -> None:
        """Put a new worker in the place of one that is lost, and wait until it is ready.

        Raises:
            EnvError: it failed to start. All workers have been stopped then.
        """
        self._channels[index].close()
        try:
            started = self._start(self.names[index], self._payloads[index])
            self._channels[index], self._handles[index] = started
            self._await_ready(index)
        except BaseException:
            self.close(grace_s=1.0)
            raise

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def pids(self) -> list[int]:
        """Process ids (those that are no threads)."""
        return [handle.pid for handle in self._handles if hasattr(handle, "pid")]

    def signal(self, index: int, byte: bytes) -> None:
        """Wake a worker up.

        Raises:
            EnvError: it failed, see :meth:`wait`.
        """
        try:
            self._channels[index].signal(byte)
        except IndexError:
            raise EnvError(_ENDED) from None
        except OSError:
            while True:  # until there is no more that it said before its end
                self.wait(index)

    def wait(self, index: int, *, deadline_s: float | None = None) -> bytes:
        """A worker's next signal.

        Raises:
            WorkerLostError: the worker died or hung. All have been stopped then, unless it may be
                restarted.
            EnvError: the worker raised (its traceback is the cause). All have been stopped.
        """
        try:
            byte = self._channels[index].wait(awake_s=self._awake_s)
        except IndexError:
            raise EnvError(_ENDED) from None
        except TimeoutError:
            self._fail_hung(index, deadline_s or self._deadline_s)
        except (EOFError, OSError):
            self._fail_dead(index)
        if byte == FAILED:
            self._fail_raised(index)
        return byte

    def close(self, *, grace_s: float = _GRACE_S) -> None:
        """Ask every worker to end, and kill those that have not after ``grace_s``."""
        self._finalizer.cancel()
        _stop(self._channels, self._handles, grace_s)

    def _fail_raised(self, index: int) -> None:
        try:
            failure = json.loads(self._channels[index].receive())
        except (EOFError, OSError):
            self._fail_dead(index)
        self.close(grace_s=1.0)
        cause = RemoteTraceback(failure["traceback"])
        raise EnvError(failure["message"], evidence=failure["evidence"]) from cause

    def _fail_dead(self, index: int) -> None:
        handle = self._handles[index]
        handle.join(2.0)
        code = getattr(handle, "exitcode", None)
        self.lose(index, f"{describe_exit(code)}{exit_hint(code)}")

    def _fail_hung(self, index: int, deadline_s: float) -> None:
        pid = getattr(self._handles[index], "pid", None)
        where = "" if pid is None else f" (process {pid}, killed)"
        self.lose(
            index,
            f"has not answered for {deadline_s:g} s{where}: "
            "look for an endless loop or a lock in the environment's step, reset or constructor",
        )

    def lose(self, index: int, what: str) -> NoReturn:
        """Kill a worker that is of no use any more.

        Raises:
            WorkerLostError: always; its message is the worker's name and ``what``.
        """
        _kill(self._handles[index])
        if not self._may_restart:
            self.close(grace_s=1.0)
        raise WorkerLostError(f"{self.names[index]} {what}", index)


class SharedArrays:
    """Arrays in memory that the workers share, without a name that could outlive them.

    Attributes:
        layout: shape and type of each array by name.
    """

    def __init__(self, layout: dict[str, tuple[tuple[int, ...], str]]) -> None:
        self.layout = layout
        self._memory: Any = _spawn.RawArray(ctypes.c_byte, max(1, sum(self._sizes())))

    def _sizes(self) -> list[int]:
        """Bytes of each array, up to a cache line so that no two workers' arrays share one."""
        exact = [
            int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self.layout.values()
        ]
        return [-(-size // 64) * 64 for size in exact]

    def views(self) -> dict[str, np.ndarray]:
        """The arrays by name, as this process sees them."""
        views, start = {}, 0
        for (name, (shape, dtype)), size in zip(self.layout.items(), self._sizes(), strict=True):
            count = int(np.prod(shape))
            flat = np.frombuffer(self._memory, dtype, count=count, offset=start)
            views[name] = flat.reshape(shape)
            start += size
        return views


# --------------------------------------------------------------------------------------------------
# In the worker


def _worker_main(connection: Any, payload: bytes, shared: SharedArrays, bound: bool) -> None:  # noqa: ANN401
    """What a worker process runs first."""
    leave_signals_to_parent()
    end_with_parent(bound)
    if not _serve(connection, payload, shared):
        sys.exit(1)


def _serve(connection: Any, payload: bytes, shared: SharedArrays) -> bool:  # noqa: ANN401
    """Run a worker's target; whether it ended well."""
    channel = Channel(connection)
    try:
        target, argument = cloudpickle.loads(payload)
        target(channel, argument, shared)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the trainer may be gone
            channel.signal(FAILED)
            channel.send(json.dumps(_failure(error)).encode())
        return False
    finally:
        channel.close()
    return True


def _failure(error: BaseException) -> dict[str, str]:
    """What the trainer is told: the message, and where it came from."""
    evidence = ""
    if isinstance(error, EnvError):
        message, origin, evidence = str(error), error.__cause__ or error, error.evidence
    else:
        message, origin = f"{type(error).__name__} in a worker: {first_line(error)}", error
    text = traceback.format_exception(type(origin), origin, origin.__traceback__)
    return {"message": message, "traceback": "".join(text), "evidence": evidence}


# --------------------------------------------------------------------------------------------------
# In the trainer


def pickled(value: Any, name: str) -> bytes:  # noqa: ANN401 - any value
    """What cloudpickle sends to a worker process.

    Raises:
        NotPicklableError: it cannot; the message calls it ``name``.
    """
    try:
        return cloudpickle.dumps(value)  # type: ignore[no-any-return]
    except Exception as error:  # whatever an object's own reduction raises
        raise NotPicklableError(
            f"{name} cannot be sent to a worker process "
            f"({type(error).__name__}: {first_line(error)}): "
            "make what it holds inside of the environment's constructor"
        ) from error


def _stop(channels: list[Channel], handles: list[_Handle], grace_s: float = _GRACE_S) -> None:
    """Ask, wait, kill. Leaves both lists empty of anything that runs."""
    for channel in channels:
        with contextlib.suppress(OSError, ValueError):
            channel.signal(QUIT)
    end_s = time.monotonic() + grace_s
    for handle in handles:
        handle.join(max(0.0, end_s - time.monotonic()))
        if handle.is_alive():
            _kill(handle)
    for channel in channels:
        with contextlib.suppress(OSError):
            channel.close()
    channels.clear()


def _kill(handle: _Handle) -> None:
    if hasattr(handle, "kill"):
        handle.kill()
        handle.join(_GRACE_S)
