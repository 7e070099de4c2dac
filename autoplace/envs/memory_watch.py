"""Workers whose memory grows until there is none left.

A worker leaks where less than 5 % of the memory that may be used is left *and* that worker has
grown by more than that 5 % since it was first looked at; of several, the one that grew most. So an
environment may use as much memory as there is, and a worker is named before the system kills
whichever process it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoplace.cgroups import memory_left_bytes, memory_limit_bytes
from autoplace.units import format_bytes

LOOK_INTERVAL_S = 5.0
_SHORT_FRACTION = 0.05


def usable_memory() -> tuple[int, int]:
    """(all, left) bytes of the memory that may be used: the machine's, or a control group's."""
    import psutil  # here: whoever is watched does without

    machine = psutil.virtual_memory()
    limit, left = memory_limit_bytes(), memory_left_bytes()
    return (
        min(machine.total, machine.total if limit is None else limit),
        min(machine.available, machine.available if left is None else left),
    )


def resident_bytes(pid: int) -> int:
    """Memory that a process holds, 0 where it is gone."""
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


class MemoryWatch:
    """Looks at processes now and then."""

    def __init__(
        self,
        pids: Sequence[int],
        *,
        memory: Callable[[], tuple[int, int]] = usable_memory,
        resident: Callable[[int], int] = resident_bytes,
    ) -> None:
        """Remember how much each process holds now."""
        self._memory, self._resident = memory, resident
        self._pids = list(pids)
        self._before = [resident(pid) for pid in pids]

    def replace(self, index: int, pid: int) -> None:
        """Watch another process in place of one that is gone."""
        self._pids[index], self._before[index] = pid, self._resident(pid)

    def leaking(self) -> tuple[int, str] | None:
        """Which process leaks, and what it did; ``None`` where none does."""
        if not self._pids:
            return None
        whole, left = self._memory()
        short = _SHORT_FRACTION * whole
        if left >= short:
            return None
        now = [self._resident(pid) for pid in self._pids]
        growths = [after - before for after, before in zip(now, self._before, strict=True)]
        index = max(range(len(growths)), key=growths.__getitem__)
        if growths[index] <= short:
            return None
        return index, (
            f"has grown from {format_bytes(self._before[index])} to {format_bytes(now[index])} "
            f"while {format_bytes(left)} of {format_bytes(whole)} are left: look for what the "
            "environment keeps from step to step"
        )
