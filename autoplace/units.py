"""SI numbers as a person reads them."""

from __future__ import annotations

import math


def format_seconds(seconds: float) -> str:
    """Three significant digits with the unit that fits: ``41.3 ms``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= 0.9995 * scale:  # what rounds to 1,000 of a unit is 1 of the next
            shown = math.copysign(max(abs(seconds / scale), 1.0), seconds)
            return f"{significant(shown)} {unit}"
    return f"{significant(seconds / 1e-9)} ns" if seconds else "0 s"


def format_bytes(nbytes: float) -> str:
    """Binary units, three significant digits: ``23.5 GiB``."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) >= scale:
            return f"{significant(nbytes / scale)} {unit}"
    return f"{nbytes:.0f} B"


def format_rate(per_s: float) -> str:
    """A rate with thousands separated, whole from 100 on: ``12,340``."""
    return f"{per_s:,.0f}" if abs(per_s) >= 100 else significant(per_s)


def format_percent(fraction: float) -> str:
    """A fraction as per cent with no more digits than matter: ``3.4 %``, ``41 %``."""
    percent = 100 * fraction
    return f"{percent:.0f} %" if abs(percent) >= 10 else f"{percent:.1f} %"


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds: ``1:02:03`` or ``2:03``."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def significant(value: float, digits: int = 3) -> str:
    """``value`` rounded to so many significant digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"
