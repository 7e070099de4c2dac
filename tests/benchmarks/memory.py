"""Memory of a process and of all that it has started."""

from __future__ import annotations

import sys

import psutil


def tree_bytes() -> tuple[int, int]:
    """(peak, proportional peak) bytes of this process and its children, added up.

    The peak is each one's largest resident memory so far, in which what several share counts
    several times; the proportional set size counts a page shared by n as one nth. That is known for
    now only: what a process has held beyond what it holds now is added, which was its own.
    Where the system tells neither, both are what is resident now.
    """
    peak = proportional = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        if sys.platform == "linux":
            now = _numbers(f"/proc/{process.pid}/smaps_rollup")
            most = _numbers(f"/proc/{process.pid}/status").get("VmHWM", 0)
            peak += most
            proportional += now.get("Pss", 0) + max(0, most - now.get("Rss", most))
        else:
            memory = process.memory_info()
            peak += getattr(memory, "peak_wset", memory.rss)
            proportional += memory.rss
    return peak, proportional


def _numbers(path: str) -> dict[str, int]:
    """The sizes in a file of /proc, in bytes by name; none once the process is gone."""
    try:
        with open(path, encoding="ascii") as lines:
            words = [line.split() for line in lines]
    except OSError:
        return {}
    return {w[0].rstrip(":"): 1024 * int(w[1]) for w in words if w[2:] == ["kB"]}
