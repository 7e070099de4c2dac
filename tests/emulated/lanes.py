"""Concurrent threads of the emulated program, run one at a time in the order of virtual time.

A *lane* is one thread of control of the program (the main one, a sampler, a learner, a stand-in for
a worker process) with its own virtual time. Only one lane runs at any moment: after everything that
costs time, the lane furthest behind goes on. The order in which lanes reach the devices and each
other is therefore the order of virtual time, and a run repeats to the bit.

A lane that waits for another must do so here (:meth:`Lanes.wait`, :class:`LaneChannel`,
:meth:`LaneThread.join`); one that blocks on a lock or a queue of Python's would keep its turn for
ever, which is reported after a minute of real time.

The lanes share the cores. While the threads that busy lanes use exceed the cores, all of them slow
down in proportion; a lane that waits for a message or for a device uses none. What a lane will use
beyond the time that it has reached is taken to be what it used last, one thread at its start.
"""

from __future__ import annotations

import contextlib
import math
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

Ready = Callable[[], "float | None"]

# How often, and how many times in vain, a lane looks whether another one gives its turn up. What
# counts is looks: a machine that is busy or stopped lets nobody look.
_LOOK_S, _LOOKS = 1.0, 60


class LaneStopped(BaseException):
    """Raised inside lanes that still wait when the machine is switched off."""


class Lane:
    """One thread of the emulated program.

    Attributes:
        name: for messages.
        turn: notified when it is to run, or to end.
        order: decides between lanes at the same time, and seeds this lane's noise.
        time_s: the virtual time it has reached.
        threads: its intra-op threads of torch.
        factor: noise of the stretch being timed.
        random: source of that noise.
    """

    def __init__(
        self, name: str, order: int, time_s: float, threads: int, seed: int, lock: threading.RLock
    ) -> None:
        self.turn = threading.Condition(lock)
        self.name = name
        self.order = order
        self.time_s = time_s
        self.threads = threads
        self.factor = 1.0
        self.random = random.Random(f"{seed}/{order}")
        self.ready: Ready | None = None  # what it waits for; None while it runs
        self._last_threads = 1
        self._busy: deque[tuple[float, float, int]] = deque()  # (start, end, threads used)

    def wake_s(self) -> float | None:
        """The time at which it can go on, or ``None`` while it cannot."""
        if self.ready is None:
            return self.time_s
        at = self.ready()
        return None if at is None else max(at, self.time_s)

    def record(self, start_s: float, end_s: float, threads: int) -> None:
        """Remember that it kept ``threads`` threads busy."""
        self._last_threads = threads
        if self._busy and self._busy[-1][1:] == (start_s, threads):
            start_s = self._busy.pop()[0]
        self._busy.append((start_s, end_s, threads))

    def forget_before(self, time_s: float) -> None:
        """Drop what ended before ``time_s``, except for the latest."""
        while len(self._busy) > 1 and self._busy[0][1] < time_s:
            self._busy.popleft()

    def demand(self, time_s: float) -> tuple[int, float]:
        """Threads that it keeps busy at ``time_s``, and until when that is so."""
        if time_s >= self.time_s:
            return (self._last_threads if self.ready is None else 0), math.inf
        for start, end, threads in self._busy:
            if time_s < start:
                return 0, start
            if time_s < end:
                return threads, end
        return 0, self.time_s


class Lanes:
    """All lanes of one machine, the turn they take, and the cores they share."""

    def __init__(self, *, cores: int, threads: int, seed: int) -> None:
        self.cores = cores
        self.competing_load = 0.0
        self._seed = seed
        self._lock = threading.RLock()
        self._num_turns = 0
        self._by_thread: dict[int, Lane] = {}
        self._count = 1
        self._stopped = False
        self.handles: list[LaneThread] = []
        self.main = Lane("main", 0, 0.0, threads, seed, self._lock)
        self._lanes = [self.main]
        self._running = self.main
        self._by_thread[threading.get_ident()] = self.main

    # ---------------------------------------------------------------------------------- the turn

    def current(self) -> Lane:
        """The lane of the calling thread.

        Raises:
            RuntimeError: the thread was started outside the emulator.
        """
        lane = self._by_thread.get(threading.get_ident())
        if lane is None:
            raise RuntimeError(
                f"thread {threading.current_thread().name!r} is not a lane of the emulated "
                "machine, so its time is unknown: start it with VirtualClock.spawn"
            )
        return lane

    def owns_thread(self) -> bool:
        """Whether the calling thread is a lane."""
        return threading.get_ident() in self._by_thread

    def yield_turn(self) -> None:
        """Let the lane furthest behind go on, and return when that is the calling one."""
        if len(self._lanes) == 1:
            return
        self._pass_turn(self.current())

    def wait(self, ready: Ready, *, timeout_s: float | None = None) -> bool:
        """Wait until ``ready()`` gives a time, and move to it; whether it did within the timeout.

        ``ready`` is called under a lock by any lane's thread: it may only look at plain data.

        Raises:
            RuntimeError: every lane waits, and nothing can wake one.
        """
        lane = self.current()
        deadline = math.inf if timeout_s is None else lane.time_s + timeout_s

        def wake() -> float | None:
            at = ready()
            if at is not None and at <= deadline:
                return at
            return None if deadline == math.inf else deadline

        lane.ready = wake
        try:
            self._pass_turn(lane)
            at = wake()
            if at is None:
                raise self._deadlock()
        finally:
            lane.ready = None
        lane.time_s = max(lane.time_s, at)
        done = ready()
        return done is not None and done <= deadline

    def _pass_turn(self, lane: Lane) -> None:
        with self._lock:
            following = self._next()
            if following is None:
                raise self._deadlock()
            if following is lane:
                return
            self._run(following)
            self._await_turn(lane)

    def _run(self, lane: Lane) -> None:
        self._running = lane
        self._num_turns += 1
        lane.turn.notify()

    def _deadlock(self) -> RuntimeError:
        names = ", ".join(other.name for other in self._lanes)
        return RuntimeError(f"deadlock: all lanes wait for each other ({names})")

    def _await_turn(self, lane: Lane) -> None:
        looks, turn = 0, self._num_turns
        while self._running is not lane:
            lane.turn.wait(_LOOK_S)
            if self._stopped:
                raise LaneStopped
            looks, turn = (looks + 1 if self._num_turns == turn else 0), self._num_turns
            if looks >= _LOOKS and self._running is not lane:
                raise RuntimeError(
                    f"lane {self._running.name} kept its turn for {_LOOKS * _LOOK_S:g} s of real "
                    "time: it blocks on something that is not a lane's wait"
                )

    def _next(self) -> Lane | None:
        best: tuple[float, int] | None = None
        following = None
        for lane in self._lanes:
            at = lane.wake_s()
            if at is not None and (best is None or (at, lane.order) < best):
                best, following = (at, lane.order), lane
        return following

    # -------------------------------------------------------------------------- starting, stopping

    def spawn(
        self,
        target: Callable[[], Any],
        *,
        name: str,
        start_s: float,
        around: contextlib.AbstractContextManager[Any],
    ) -> LaneThread:
        """Start ``target`` on a new lane, ``start_s`` from now, inside the context ``around``."""
        parent = self.current()
        lane = Lane(
            name, self._count, parent.time_s + start_s, parent.threads, self._seed, self._lock
        )
        self._count += 1
        handle = LaneThread(self, lane)
        self.handles.append(handle)

        def body() -> None:
            with self._lock:
                self._by_thread[threading.get_ident()] = lane
            try:
                with self._lock:
                    self._await_turn(lane)
                with around:
                    target()
            except LaneStopped:
                pass
            except BaseException as error:
                handle.error = error
            finally:
                handle.finished_s = lane.time_s
                self._leave(lane)

        with self._lock:
            self._lanes.append(lane)
        handle.thread = threading.Thread(target=body, name=name, daemon=True)
        handle.thread.start()
        self.yield_turn()
        return handle

    def _leave(self, lane: Lane) -> None:
        with self._lock:
            self._lanes.remove(lane)
            del self._by_thread[threading.get_ident()]
            if self._running is lane and not self._stopped:
                # Where nobody can go on, the main lane does, and reports the deadlock.
                self._run(self._next() or self.main)

    def stop(self) -> tuple[list[str], list[BaseException]]:
        """End every lane that still waits.

        Returns:
            Names of the lanes that had not finished, and errors that nobody joined.
        """
        with self._lock:
            self._stopped = True
            left = [lane.name for lane in self._lanes if lane is not self.main]
            for lane in self._lanes:
                lane.turn.notify()
        for handle in self.handles:
            if handle.thread is not None:
                handle.thread.join(_LOOKS * _LOOK_S)
        return left, [handle.error for handle in self.handles if handle.error is not None]

    # ---------------------------------------------------------------------------------- the cores

    def work(self, lane: Lane, seconds: float, threads: int) -> None:
        """Move ``lane`` on by ``seconds`` of work on ``threads`` threads, sharing the cores."""
        start = time_s = lane.time_s
        if len(self._lanes) == 1:
            time_s += seconds * self._slowdown(threads)
        else:
            while True:
                others, until = 0, math.inf
                for other in self._lanes:
                    if other is not lane:
                        used, end = other.demand(time_s)
                        others, until = others + used, min(until, end)
                slowdown = self._slowdown(threads + others)
                if time_s + seconds * slowdown <= until:
                    time_s += seconds * slowdown
                    break
                seconds -= (until - time_s) / slowdown
                time_s = until
            oldest = min(other.time_s for other in self._lanes)
            lane.forget_before(oldest)
            lane.record(start, time_s, threads)
        lane.time_s = time_s

    def _slowdown(self, threads: float) -> float:
        return max(1.0, (threads + self.competing_load) / self.cores)


class LaneThread:
    """A started lane: what a ``threading.Thread`` is outside the emulator."""

    def __init__(self, lanes: Lanes, lane: Lane) -> None:
        self._lanes = lanes
        self._lane = lane
        self.thread: threading.Thread | None = None
        self.finished_s: float | None = None
        self.error: BaseException | None = None

    @property
    def name(self) -> str:
        """The lane's name."""
        return self._lane.name

    def is_alive(self) -> bool:
        """Whether it still runs at the caller's virtual time."""
        now_s = self._lanes.current().time_s
        return self.finished_s is None or self.finished_s > now_s

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end in virtual time, and raise what it raised."""
        finished = self._lanes.wait(lambda: self.finished_s, timeout_s=timeout)
        if finished and self.error is not None:
            error, self.error = self.error, None
            raise error


class LaneChannel:
    """A queue between lanes. What is put arrives ``handoff_s`` later."""

    def __init__(self, lanes: Lanes, handoff_s: float) -> None:
        self._lanes = lanes
        self._handoff_s = handoff_s
        self._items: deque[tuple[float, Any]] = deque()

    def put(self, item: Any) -> None:
        """Send ``item``; costs the sender nothing."""
        self._items.append((self._lanes.current().time_s + self._handoff_s, item))

    def ready_s(self) -> float | None:
        """When the next item arrives, or ``None`` where none is under way."""
        return self._items[0][0] if self._items else None

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the next item.

        Raises:
            queue.Empty: none arrived within ``timeout`` virtual seconds.
        """
        if not self._lanes.wait(self.ready_s, timeout_s=timeout):
            raise queue.Empty
        return self._items.popleft()[1]

    def empty(self) -> bool:
        """Whether nothing has arrived at the caller's virtual time."""
        at = self.ready_s()
        return at is None or at > self._lanes.current().time_s


def first_ready(channels: Iterable[LaneChannel], threads: Iterable[LaneThread] = ()) -> Ready:
    """What :meth:`Lanes.wait` takes to wait for the first of several channels and ends."""
    channels, threads = tuple(channels), tuple(threads)

    def ready() -> float | None:
        times = [*(c.ready_s() for c in channels), *(t.finished_s for t in threads)]
        return min((at for at in times if at is not None), default=None)

    return ready
