"""How an iteration is laid out on the devices: a file and an entry per scheme."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoplace.errors import UsageError
from autoplace.train.schemes.asynchronous import AsyncScheme
from autoplace.train.schemes.base import Scheme, Setup
from autoplace.train.schemes.cpu import CpuScheme
from autoplace.train.schemes.double_buffer import make_double_buffer
from autoplace.train.schemes.gpu import GpuScheme
from autoplace.train.schemes.hybrid import HybridScheme

__all__ = ["SCHEMES", "Scheme", "SchemeEntry", "Setup", "make_scheme", "overlaps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeEntry:
    """A scheme that the trainer can run.

    Attributes:
        name: as in a plan.
        make: lays it out.
        overlaps: whether it learns while it samples, in another process.
    """

    name: str
    make: Callable[[Setup], Scheme]
    overlaps: bool = False


SCHEMES: tuple[SchemeEntry, ...] = (
    SchemeEntry(name="cpu", make=CpuScheme),
    SchemeEntry(name="hybrid", make=HybridScheme),
    SchemeEntry(name="gpu", make=GpuScheme),
    SchemeEntry(name="double-buffer", make=make_double_buffer, overlaps=True),
    SchemeEntry(name="async", make=AsyncScheme, overlaps=True),
)


def overlaps(name: str) -> bool:
    """Whether the scheme ``name`` learns while it samples, in another process."""
    return any(entry.name == name and entry.overlaps for entry in SCHEMES)


def make_scheme(name: str, setup: Setup) -> Scheme:
    """Lay the scheme ``name`` out.

    Raises:
        UsageError: there is no such scheme.
    """
    for entry in SCHEMES:
        if entry.name == name:
            return entry.make(setup)
    names = ", ".join(entry.name for entry in SCHEMES)
    raise UsageError(f"--scheme is one of {names}, got {name!r}: name one of them")
