"""Environment workers as lanes of the emulated machine.

A stand-in for :class:`autoplace.envs.workers.Workers`: what a worker charges is charged to a lane
of its own, and a signal takes the machine's ``handoff_s``, as a message does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autoplace import device
from autoplace.envs.workers import QUIT, READY


class LaneSignals:
    """One end of a two-way channel of signals."""

    def __init__(self, inbound: Any, outbound: Any) -> None:
        self._inbound, self._outbound = inbound, outbound

    def signal(self, byte: bytes) -> None:
        self._outbound.put(byte)

    def wait(self) -> bytes:
        byte: bytes = self._inbound.get()
        return byte


class LaneWorkers:
    """Lanes that run the same function, each with an argument of its own."""

    pids: tuple[int, ...] = ()

    def __init__(
        self,
        target: Callable[[Any, Any, Any], None],
        arguments: Sequence[Any],
        *,
        names: Sequence[str],
        shared: Any = None,
        **_: Any,
    ) -> None:
        self.names = list(names)
        self._ends: list[LaneSignals] = []
        self._lanes = []
        for name, argument in zip(self.names, arguments, strict=True):
            orders, answers = device.message_channel(), device.message_channel()
            there = LaneSignals(orders, answers)
            self._ends.append(LaneSignals(answers, orders))
            self._lanes.append(device.spawn(target, there, argument, shared, name=name))
        for end in self._ends:
            assert end.wait() == READY

    def signal(self, index: int, byte: bytes) -> None:
        self._ends[index].signal(byte)

    def wait(self, index: int, *, deadline_s: float | None = None) -> bytes:
        return self._ends[index].wait()

    def close(self) -> None:
        for end in self._ends:
            end.signal(QUIT)
        for lane in self._lanes:
            lane.join()
        self._ends, self._lanes = [], []
