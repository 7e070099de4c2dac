"""Other work that keeps cores busy while something is timed.

The first core is kept busy as a learner does it, by gradient steps; the others, and in quick
calibrations the first one too, by Python, whose processes start in a moment.
"""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Iterator
from typing import Any

from autoplace import device
from autoplace.interpreter import keep_busy, keep_interpreting
from autoplace.measure.probes import build_probe
from autoplace.measurement import Task
from autoplace.processes import ChildProcess

# Within which another process has started, or has come to the end of its stretch of work.
_ANSWER_TIMEOUT_S = 30.0
_GRACE_S = 1.0
# Of virtual time, for a stretch of Python.
_CHARGED_S = 1e-3


class LoadError(Exception):
    """No other process could be kept busy."""


class Load:
    """Processes (on a virtual clock: lanes) that are busy when they are told to be."""

    def __init__(self, learner: Task | None) -> None:
        """Let the first of them repeat ``learner``, if it is given."""
        self._learner = learner
        self._partners: list[_Partner] = []

    @contextlib.contextmanager
    def on(self, cores: int) -> Iterator[None]:
        """Keep so many cores busy inside the block.

        Raises:
            LoadError: it cannot be done.
        """
        while len(self._partners) < cores:
            learner = None if self._partners else self._learner
            self._partners.append(_Partner(learner))
        partners = self._partners[:cores]
        for partner in partners:
            partner.send()
        for partner in partners:
            partner.wait()
        yield
        for partner in partners:
            partner.send()
        for partner in partners:
            partner.wait()
        if not device.spawns_processes():  # a lane is started in no time, and at rest it is a cost
            self.close()

    def close(self) -> None:
        """End them all."""
        for partner in self._partners:
            partner.close()
        self._partners = []


class _Partner:
    def __init__(self, learner: Task | None) -> None:
        self._orders, self._answers = device.message_channel(), device.message_channel()
        channels = (self._orders, self._answers)
        name = "autoplace load"
        if learner is not None:
            self._process: Any = device.spawn(
                _keep_learning, *channels, learner, name=name, at_once=True
            )
        else:
            charge = functools.partial(device.charge, seconds=_CHARGED_S)
            self._process = device.spawn(
                keep_interpreting,
                *channels,
                None if device.spawns_processes() else charge,
                name=name,
                at_once=True,
            )

    def send(self) -> None:
        with contextlib.suppress(OSError):  # the answer that is missing then says so
            self._orders.put(1)

    def wait(self) -> None:
        try:
            self._answers.get(timeout=_ANSWER_TIMEOUT_S)
        except (queue.Empty, OSError, EOFError) as error:
            raise LoadError("no other process could be kept busy") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._orders.put(None)
        if isinstance(self._process, ChildProcess):
            self._process.stop(_GRACE_S)
        else:
            self._process.join()


def _keep_learning(orders: Any, answers: Any, task: Task) -> None:  # noqa: ANN401 - any clock's
    with device.torch_threads(1):
        probe = build_probe(task)
        keep_busy(orders, answers, lambda: probe.sample(1))
