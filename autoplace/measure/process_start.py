"""How long one of the trainer's processes takes to start, until it is ready for work."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from autoplace import device
from autoplace.device import MessageChannel
from autoplace.measurement import PROCESS_START, Measurement
from autoplace.ppo import steps  # noqa: F401 - as the processes of a run import it
from autoplace.processes import ChildProcess

log = logging.getLogger(__name__)

DEADLINE_S = 120.0
_GRACE_S = 1.0


def measure_process_start(
    *, num_samples: int, meanwhile: Callable[[], None] | None = None
) -> list[Measurement]:
    """Time so many starts, one after the other; nothing where no process can be started.

    ``meanwhile`` runs beside the first of them, where that is a process.
    """
    other = threading.Thread(target=meanwhile) if meanwhile is not None else None
    if other is not None and device.spawns_processes():
        other.start()
    try:
        return _measure(num_samples)
    finally:
        if other is not None and other.ident is not None:
            other.join()


def _measure(num_samples: int) -> list[Measurement]:
    times_s = []
    for _ in range(num_samples):
        ready = device.message_channel()
        start_s = device.now()
        process = device.spawn(_report, ready, name="autoplace start")
        try:
            ready.get(timeout=DEADLINE_S)
            times_s.append(device.now() - start_s)
        except queue.Empty:
            log.warning("the start of a process was not timed: none answered")
            return []
        finally:
            if isinstance(process, ChildProcess):
                process.stop(_GRACE_S)
            else:
                process.join()
    return [Measurement(task=PROCESS_START, times_s=tuple(times_s))]


def _report(ready: MessageChannel) -> None:
    ready.put(None)
