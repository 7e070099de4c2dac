"""Processes of a run: nothing is started beside them, and they may start what they like."""

import functools
import multiprocessing
from multiprocessing import shared_memory

import psutil

from autoplace.processes import ChildProcess, PipeChannel


def share_and_lock(channel):
    """What an environment may do for itself: memory and a lock that have names."""
    memory = shared_memory.SharedMemory(create=True, size=8)
    memory.buf[0] = 7
    with multiprocessing.get_context("spawn").Lock():
        channel.put(memory.buf[0])
    memory.close()
    memory.unlink()


def test_a_process_is_started_alone_and_can_share_by_name_itself():
    before = {child.pid for child in psutil.Process().children()}
    channel = PipeChannel()
    process = ChildProcess(functools.partial(share_and_lock, channel), name="shares")
    started = {child.pid for child in psutil.Process().children()} - before
    assert channel.get(timeout=60.0) == 7
    process.join(60.0)
    assert (process.exitcode, started) == (0, {process.pid})
