"""The order of costed placements: the fastest first, and of those as fast the safest."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplace.planner.placements import Codes
from autoplace.planner.space import Costed, SchemeSpace

# Two placements closer than this are equally fast, and the safer one is taken.
SAME_SPEED_FRACTION = 0.03
# Placements that differ in one of these beside the scheme are of another kind.
_KIND = (
    "minibatch_rows",
    "sample_threads",
    "learn_threads",
    "learn_device",
    "env_backend",
    "num_workers",
    "engine",
)


class Ranking:
    """The costed placements of one of the workloads in some spaces.

    First comes the safest of those within 3 % of the best score, then all others by their score: a
    smaller minibatch learns more safely, fewer threads suffer less from other programs, a policy
    that samples is better not old, and fewer processes are simpler.
    """

    def __init__(self, spaces: Sequence[SchemeSpace], variant: int = 0) -> None:
        found = [np.flatnonzero(space.placements.variant == variant) for space in spaces]
        used = [index for index, rows in enumerate(found) if len(rows)]
        self._spaces = [spaces[index] for index in used]
        self._rows = [found[index] for index in used]
        sizes = [len(rows) for rows in self._rows]
        self._space_of = np.repeat(np.arange(len(used)), sizes)
        self._ends = np.cumsum(sizes)

    def __len__(self) -> int:
        return len(self._space_of)

    def __getitem__(self, place: int) -> Costed:
        """The best placement of each scheme, then all others, each in order of score."""
        return self._costed(int(self._best_per_scheme_first[place]))

    @property
    def schemes(self) -> tuple[str, ...]:
        """That have placements."""
        return tuple(space.scheme.name for space in self._spaces)

    @property
    def best(self) -> Costed:
        """The first."""
        return self._costed(self._best)

    @property
    def runner_up(self) -> Costed | None:
        """The best of another scheme; with one scheme only, the best other placement."""
        others = self._order[1:]
        other_scheme = others[self._space_of[others] != self._space_of[self._best]]
        found = other_scheme if len(other_scheme) else others
        return self._costed(int(found[0])) if len(found) else None

    def contenders(self, share: float, most: int) -> list[Costed]:
        """The best of each kind, best first, with at least ``share`` of the choice's score.

        The choice itself is left out.
        """
        columns = [self._column(name) for name in _KIND]
        keys = np.stack([self._space_of, *(np.unique(c, return_inverse=True)[1] for c in columns)])
        order = self._order[self._score[self._order] >= share * self._score[self._best]]
        _, firsts = np.unique(keys[:, order], axis=1, return_index=True)
        return [self._costed(int(order[place])) for place in np.sort(firsts) if place][:most]

    def _costed(self, index: int) -> Costed:
        space = int(self._space_of[index])
        place = index - int(self._ends[space])  # counted from the end of its space
        return Costed(self._spaces[space], int(self._rows[space][place]))

    def _column(self, name: str) -> NDArray[Any]:
        """A field of the placements."""
        pairs = zip(self._spaces, self._rows, strict=True)
        return np.concatenate([getattr(s.placements, name)[rows] for s, rows in pairs])

    @functools.cached_property
    def _score(self) -> NDArray[np.float64]:
        return np.concatenate(
            [s.score[rows] for s, rows in zip(self._spaces, self._rows, strict=True)]
        )

    def _by_score(self, of: Codes) -> Codes:
        """Of equal scores the smaller minibatch first, then by the name of the scheme."""
        names = np.argsort(np.argsort(self.schemes))
        keys = names[self._space_of], self._column("minibatch_rows"), -self._score
        return of[np.lexsort([key[of] for key in keys])]

    @functools.cached_property
    def _best(self) -> int:
        limit = self._score.max() * (1 - SAME_SPEED_FRACTION)
        close = self._by_score(np.flatnonzero(self._score >= limit))
        workers = self._column("num_workers")[close]
        sampling = np.maximum(self._column("sample_threads")[close], workers)
        risks = (
            self._column("minibatch_rows")[close],
            sampling + self._column("learn_threads")[close],
            self._column("max_policy_lag")[close],
            workers,
            self._column("num_groups")[close],
        )
        return int(close[np.lexsort(risks[::-1])[0]])

    @functools.cached_property
    def _best_per_scheme_first(self) -> Codes:
        _, firsts = np.unique(self._space_of[self._order], return_index=True)
        is_first = np.zeros(len(self), dtype=np.bool_)
        is_first[firsts] = True
        return np.concatenate([self._order[is_first], self._order[~is_first]])

    @functools.cached_property
    def _order(self) -> Codes:
        order = self._by_score(np.arange(len(self)))
        return np.concatenate([[self._best], order[order != self._best]])
