"""Memory of a process and of all that it has started."""

from __future__ import annotations

import sys

import psutil


def tree_bytes() -> tuple[int, int]:
    """(peak, proportional) bytes of this process and its children, added up.

    The peak is each one's largest resident memory so far, in which what several share counts
    several times; the proportional set size, as of now, counts a page shared by n as one nth.
    Where the system tells neither, both are what is resident now.
    """
    peak = proportional = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        if sys.platform == "linux":
            peak += _kibibytes(f"/proc/{process.pid}/status", "VmHWM:")
            proportional += _kibibytes(f"/proc/{process.pid}/smaps_rollup", "Pss:")
        else:
            memory = process.memory_info()
            peak += getattr(memory, "peak_wset", memory.rss)
            proportional += memory.rss
    return peak, proportional


def _kibibytes(path: str, name: str) -> int:
    """A line of a file of /proc, in bytes; 0 once the process is gone."""
    try:
        with open(path, encoding="ascii") as lines:
            return next((1024 * int(x.split()[1]) for x in lines if x.startswith(name)), 0)
    except OSError:
        return 0
