"""The CPU quota and the memory limit that Linux control groups put on this process.

A container's limits show in no count of CPUs and in no size of the memory; they are files of the
control group that the process is in, and of every group around it. The tightest one holds. Version
1 and version 2 mounts, both at once, and containers that see only their own part of the tree are
read alike. Where there are no control groups there are no limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
SYS = Path("/sys")

_DEFAULT_PERIOD_US = 100_000
_THROTTLED = {"throttled_usec": 1e-6, "throttled_time": 1e-9}  # versions 2 and 1
_NO_LIMIT_BYTES = 1 << 60  # version 1 writes "no limit" as the largest multiple of a page


def cpu_quota(*, proc_root: Path = PROC, sys_root: Path = SYS) -> float | None:
    """CPUs' worth of time that this process may use, ``None`` where it is not limited."""
    found = (_quota(folder) for folder in _groups("cpu", proc_root, sys_root))
    return min((quota for quota in found if quota is not None), default=None)


def memory_limit_bytes(*, proc_root: Path = PROC, sys_root: Path = SYS) -> int | None:
    """Bytes of memory that this process may use, ``None`` where they are not limited."""
    files = ("memory.max", "memory.high", "memory.limit_in_bytes")
    found = (
        _integer(folder / name)
        for folder in _groups("memory", proc_root, sys_root)
        for name in files
    )
    limits = (limit for limit in found if limit is not None and 0 < limit < _NO_LIMIT_BYTES)
    return min(limits, default=None)


def throttled_s(*, proc_root: Path = PROC, sys_root: Path = SYS) -> float:
    """Seconds for which the quota has held this process's group up so far; 0 without a quota."""
    held = (_throttled_s(folder) for folder in _groups("cpu", proc_root, sys_root))
    return max(held, default=0.0)


def _throttled_s(folder: Path) -> float:
    for line in read_text(folder / "cpu.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in _THROTTLED and value.isdigit():
            return int(value) * _THROTTLED[name]
    return 0.0


def memory_left_bytes(*, proc_root: Path = PROC, sys_root: Path = SYS) -> int | None:
    """Bytes that this process may still use, ``None`` where they are not limited.

    File pages that the kernel would drop at once do not count as used.
    """
    left = (_memory_left(folder) for folder in _groups("memory", proc_root, sys_root))
    return min((number for number in left if number is not None), default=None)


def _memory_left(folder: Path) -> int | None:
    for limit_name, usage_name, stat_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _integer(folder / limit_name), _integer(folder / usage_name)
        if limit is None or used is None or not 0 < limit < _NO_LIMIT_BYTES:
            continue
        match = re.search(rf"^{stat_name} (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE)
        return max(0, limit - used + (int(match[1]) if match else 0))
    return None


def _quota(folder: Path) -> float | None:
    text = read_text(folder / "cpu.max").split()  # version 2: "150000 100000" or "max 100000"
    if text:
        quota = int(text[0]) if text[0].isdigit() else -1
        period = int(text[1]) if len(text) > 1 and text[1].isdigit() else _DEFAULT_PERIOD_US
    else:
        quota = _integer(folder / "cpu.cfs_quota_us") or -1  # version 1: -1 is no limit
        period = _integer(folder / "cpu.cfs_period_us") or _DEFAULT_PERIOD_US
    return quota / period if quota > 0 and period > 0 else None


def _integer(path: Path) -> int | None:
    try:
        return int(read_text(path))
    except ValueError:  # missing, empty, or "max"
        return None


def read_text(path: Path) -> str:
    """The stripped text of a small system file, "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _groups(controller: str, proc_root: Path, sys_root: Path) -> Iterator[Path]:
    """Folders of the groups that this process is in: its own, and those around it up to the root.

    The process's path may not exist below the mount: in a container, /proc/self/cgroup can name
    the host's path while the mount shows the container's own group as its root. What is missing is
    skipped, and the root of the mount always counts.
    """
    paths = _own_paths(controller, proc_root)
    for mount, root, version in _mounts(controller, proc_root, sys_root):
        group = paths.get(version)
        parts = _parts_below(group, root) if group is not None else ()
        for length in range(len(parts), -1, -1):
            folder = mount.joinpath(*parts[:length])
            if folder.is_dir():
                yield folder


def _own_paths(controller: str, proc_root: Path) -> dict[int, str]:
    """This process's group path by version, from lines like "4:cpu,cpuacct:/a/b" or "0::/a/b"."""
    paths: dict[int, str] = {}
    for line in read_text(proc_root / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[2] = path
        elif controller in controllers.split(","):
            paths[1] = path
    return paths


def _mounts(controller: str, proc_root: Path, sys_root: Path) -> Iterator[tuple[Path, str, int]]:
    """(where it is mounted, which group is its root, version) of every fitting mount."""
    mountinfo = read_text(proc_root / "self" / "mountinfo")
    for line in mountinfo.splitlines():
        # "31 23 0:28 /root /mount/point rw ... - cgroup cgroup rw,cpu,cpuacct" (proc(5))
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or not kind:
            continue
        version = {"cgroup": 1, "cgroup2": 2}.get(kind[0])
        if version is None or (version == 1 and controller not in kind[-1].split(",")):
            continue
        point = _unescape(fields[4])
        inside_sys = point == "/sys" or point.startswith("/sys/")
        mount = sys_root / point[len("/sys/") :] if inside_sys else Path(point)
        yield mount, _unescape(fields[3]), version
    if not mountinfo:
        usual = sys_root / "fs" / "cgroup"
        if (usual / "cgroup.controllers").exists():
            yield usual, "/", 2
        else:
            for name in (controller, f"{controller},cpuacct", f"cpuacct,{controller}"):
                yield usual / name, "/", 1


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _parts_below(group: str, root: str) -> tuple[str, ...]:
    """The components of ``group`` below ``root``; none where it does not lie below."""
    parts = tuple(part for part in group.split("/") if part)
    above = tuple(part for part in root.split("/") if part)
    if ".." in parts or parts[: len(above)] != above:
        return ()
    return parts[len(above) :]
