"""Many placements as one: its fields are columns, so a formula for one reads the same for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from autoplace.planner.plan import Placement

Codes = NDArray[np.intp]
Mask = NDArray[np.bool_]

_FIELDS = tuple(field.name for field in dataclasses.fields(Placement))
# A lookup table may have so many entries for each row that is looked up.
_ENTRIES_PER_ROW = 32


class Column(NamedTuple):
    """A field of many placements: its distinct values, and which of them each row has."""

    values: tuple[Any, ...]
    codes: Codes


class Placements:
    """Rows of placements. A field of :class:`Placement`, read as an attribute, is an array ``[N]``.

    Beside those fields there is ``variant``: which of several workloads a row is a placement of.
    """

    def __init__(self, columns: Mapping[str, Column], count: int) -> None:
        self._columns = columns
        self._count = count
        self._arrays: dict[str, NDArray[Any]] = {}

    @classmethod
    def product(cls, *axes: Mapping[str, Sequence[Any]]) -> Placements:
        """Every combination of the axes' entries, the last axis running fastest.

        Fields of the same axis go together: entry i of one with entry i of the others.
        """
        sizes = [len(next(iter(axis.values()))) for axis in axes]
        places = np.indices(sizes).reshape(len(sizes), -1)
        columns = {}
        for axis, place in zip(axes, places, strict=True):
            for name, entries in axis.items():
                code_of = {value: code for code, value in enumerate(dict.fromkeys(entries))}
                codes = np.array([code_of[value] for value in entries], dtype=np.intp)
                columns[name] = Column(tuple(code_of), codes[place])
        return cls(columns, places.shape[1])

    @classmethod
    def empty(cls) -> Placements:
        """No placement at all."""
        return cls(dict.fromkeys(_FIELDS, Column((), np.zeros(0, dtype=np.intp))), 0)

    @classmethod
    def stack(cls, tables: Sequence[Placements]) -> Placements:
        """The rows of several tables one below the other, as variants 0, 1, ..."""
        columns = {}
        for name in _FIELDS:
            parts = [table._columns[name] for table in tables]
            known = dict.fromkeys(value for part in parts for value in part.values)
            code_of = {value: code for code, value in enumerate(known)}
            moved = [
                np.array([code_of[v] for v in part.values], dtype=np.intp)[part.codes]
                for part in parts
            ]
            columns[name] = Column(tuple(code_of), np.concatenate(moved))
        variants = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        columns["variant"] = Column(tuple(range(len(tables))), variants)
        return cls(columns, len(variants))

    def __len__(self) -> int:
        return self._count

    def __getattr__(self, name: str) -> NDArray[Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._arrays:
            column = self._columns[name]
            self._arrays[name] = np.array(column.values)[column.codes]
        return self._arrays[name]

    def where(self, mask: Mask) -> Placements:
        """The rows for which ``mask`` ``[N]`` holds."""
        if mask.all():
            return self
        columns = {n: Column(c.values, c.codes[mask]) for n, c in self._columns.items()}
        return Placements(columns, int(np.count_nonzero(mask)))

    def distinct(self, *fields: str) -> tuple[list[tuple[Any, ...]], Codes]:
        """The combinations of some fields' values that occur, and which of them each row has."""
        columns = [self._columns[field] for field in fields]
        code, size = np.zeros(self._count, dtype=np.intp), 1
        for column in columns:
            code = code * len(column.values) + column.codes
            size *= len(column.values)
        if size <= _ENTRIES_PER_ROW * self._count:  # by a lookup table, faster than by sorting
            occurs = np.zeros(size, dtype=np.bool_)
            occurs[code] = True
            found = np.flatnonzero(occurs)
            place = np.zeros(size, dtype=np.intp)
            place[found] = np.arange(len(found))
            inverse = place[code]
        else:
            found, inverse = np.unique(code, return_inverse=True)
        values = []
        for column in reversed(columns):
            found, codes = np.divmod(found, len(column.values) or 1)
            values.append([column.values[c] for c in codes])
        return list(zip(*reversed(values), strict=True)), inverse

    def placement(self, row: int) -> Placement:
        """One of them."""
        columns = self._columns
        return Placement(**{f: columns[f].values[columns[f].codes[row]] for f in _FIELDS})


def partial(fields: Sequence[str], values: Sequence[Any]) -> Placement:
    """A placement of which only these fields may be read."""
    return cast("Placement", SimpleNamespace(**dict(zip(fields, values, strict=True))))
