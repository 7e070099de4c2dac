"""Timings that contradict each other: what cannot be, and what is out of line.

A square product does ``2 n^3`` operations. A larger one takes longer, and on the same device none
does its work at a multiple of the rate of all others, larger ones among them: that would be the
time to ask for it, not to do it, or a clock that jumped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autoplace.measurement import Measurement
from autoplace.units import format_seconds

_FACTOR = 2.0  # of what caches, clocks and kernels explain
_LEAST_SIZES = 3


def examine_products(
    measurements: Sequence[Measurement],
) -> tuple[list[Measurement], list[Measurement]]:
    """Square products (impossible, odd): too fast for the machine, slower than a larger one."""
    groups: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
    for m in measurements:
        task = m.task
        if task.op == "matmul" and not task.beside and len(set(task.shape)) == 1:
            key = (task.device, task.threads, task.engine, task.dtype, task.residency)
            groups[key].append(m)
    impossible, odd = [], []
    for group in groups.values():
        if len(group) >= _LEAST_SIZES:
            group.sort(key=_size)
            fault = _too_fast(group)
            if fault is not None:
                impossible.append(fault)
                group.remove(fault)
            odd += [m for i, m in enumerate(group) if _is_slower_than_one_of(m, group[i + 1 :])]
    return impossible, odd


def describe_doubts(impossible: Sequence[Measurement], odd: Sequence[Measurement]) -> list[str]:
    """A line for each kind that there is."""
    lines = []
    if impossible:
        worst = max(impossible, key=_rate)
        lines.append(
            f"{_count(impossible)} faster than this machine can be, judged by all others "
            f"({_name(worst)}, {_rate(worst) / 1e12:,.3g} Tflop/s), and left out: calibrate again"
        )
    if odd:
        worst = max(odd, key=lambda m: m.median_s)
        lines.append(
            f"{_count(odd)} timed at more than {_FACTOR:.0f} x a larger one ({_name(worst)}, "
            f"{format_seconds(worst.median_s)}): close other programs and calibrate again"
        )
    return lines


def _too_fast(group: Sequence[Measurement]) -> Measurement | None:
    """The one whose rate no other comes near to, though one of them should."""
    best, *others = sorted(group, key=_rate, reverse=True)
    is_alone = _rate(best) > _FACTOR * _rate(others[0])
    # The largest may well be the first that is worth the launch.
    is_largest = best is group[-1]
    if is_alone and (not is_largest or any(_is_slower_than_one_of(m, [best]) for m in others)):
        return best
    return None


def _is_slower_than_one_of(m: Measurement, larger: Sequence[Measurement]) -> bool:
    return any(m.median_s > _FACTOR * other.median_s for other in larger)


def _size(m: Measurement) -> int:
    return m.task.shape[0]


def _rate(m: Measurement) -> float:
    """Floating-point operations per second."""
    return 2.0 * _size(m) ** 3 / m.median_s


def _count(found: Sequence[Measurement]) -> str:
    return "1 product was" if len(found) == 1 else f"{len(found)} products were"


def _name(m: Measurement) -> str:
    size = _size(m)
    return f"{size} x {size} x {size} on {m.task.device}"
