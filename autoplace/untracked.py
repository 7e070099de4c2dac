"""Processes started by ``spawn`` under POSIX, without the tracker of resources beside them.

Multiprocessing starts one more interpreter of 12 MB before the first such process, to clean up
after locks and shared memory that have a name. What a run shares has none. A child that makes some
of its own, as an environment may, starts a tracker of its own.
"""

from __future__ import annotations

import io
import os
from multiprocessing import reduction, spawn, util
from multiprocessing.context import SpawnProcess, set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen
from multiprocessing.process import BaseProcess
from typing import Any


class UntrackedProcess(SpawnProcess):
    """As a process of the context ``spawn``."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:  # noqa: N802 - the base's name
        return _UntrackedPopen(process_obj)


class _UntrackedPopen(Popen):
    def _launch(self, process_obj: Any) -> None:  # noqa: ANN401 - the base's type
        """As the base does, but for the tracker, which the child is not told of."""
        message = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), message)
            reduction.dump(process_obj, message)
        finally:
            set_spawning_popen(None)
        self.sentinel, alive = os.pipe()  # the child has the other end as long as it lives
        child_reads, parent_writes = os.pipe()  # and knows by this one that the parent does
        ours = self.sentinel, parent_writes
        self.finalizer = util.Finalize(self, util.close_fds, ours)  # type: ignore[attr-defined]
        try:
            theirs = [*self._fds, child_reads, alive]  # type: ignore[attr-defined]
            command = spawn.get_command_line(pipe_handle=child_reads)
            python: Any = spawn.get_executable()
            self.pid = util.spawnv_passfds(python, command, theirs)
        finally:
            os.close(child_reads)
            os.close(alive)
        with open(parent_writes, "wb", closefd=False) as pipe:
            pipe.write(message.getbuffer())
