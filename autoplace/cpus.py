"""The CPUs that this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Collection

from autoplace.cgroups import cpu_quota


def affinity() -> Collection[int]:
    """The CPUs of the affinity mask; all where the system has none."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    import psutil

    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # Windows, FreeBSD
        return list(process.cpu_affinity())
    return range(psutil.cpu_count(logical=True) or 1)  # macOS has no affinity


def usable(count: int, quota: float | None) -> int:
    """CPUs to plan for, of ``count`` in the mask: no more than the whole ones of a quota."""
    return min(count, max(1, math.floor(quota))) if quota else count


def usable_cpus() -> int:
    """CPUs to plan for here."""
    return usable(len(affinity()), cpu_quota())
