"""The schemes: an iteration as stages on lanes, a file and an entry per scheme.

A scheme says, without any cost, which work an iteration consists of (:attr:`Scheme.work`), and,
given the seconds of each kind of work, when it happens (:attr:`Scheme.layout`). Seconds, and fields
of placements, are arrays with an entry for each placement. Adding a scheme to the planner is one
file and its entry in :data:`SCHEMES`.
"""

from __future__ import annotations

from autoplace.planner.schemes.asynchronous import ASYNC
from autoplace.planner.schemes.base import Axes, Key, Scheme, Span, Timing, Work
from autoplace.planner.schemes.cpu import CPU
from autoplace.planner.schemes.double_buffer import DOUBLE_BUFFER
from autoplace.planner.schemes.gpu import GPU
from autoplace.planner.schemes.hybrid import HYBRID

__all__ = ["SCHEMES", "Axes", "Key", "Scheme", "Span", "Timing", "Work"]

SCHEMES: tuple[Scheme, ...] = (CPU, HYBRID, GPU, DOUBLE_BUFFER, ASYNC)
