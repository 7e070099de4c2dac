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

    The choice is the safest of those within 3 % of the best score: a smaller minibatch learns more
    safely, fewer threads suffer less from other programs, a policy that samples is better not old,
    and fewer processes are simpler. The choice within each other scheme is made the same way.
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
        """The choice of each scheme, then all others, each in order of score."""
        return self._costed(int(self._chosen_first[place]))

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
        """The best choice of another scheme; with one scheme only, the best other placement."""
        if len(self) == 1:
            return None
        return self[1] if len(self._spaces) > 1 else self._costed(int(self._order[1]))

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

    def _safest(self, of: Codes) -> int:
        """The safest of those that are as fast as the best of them."""
        limit = self._score[of].max() * (1 - SAME_SPEED_FRACTION)
        close = self._by_score(of[self._score[of] >= limit])
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
    def _best(self) -> int:
        return self._safest(np.arange(len(self)))

    @functools.cached_property
    def _chosen_first(self) -> Codes:
        others = [
            self._safest(np.flatnonzero(self._space_of == space))
            for space in range(len(self._spaces))
            if space != self._space_of[self._best]
        ]
        first = np.array([self._best, *self._by_score(np.array(others, dtype=np.int_))])
        return np.concatenate([first, self._order[~np.isin(self._order, first)]])

    @functools.cached_property
    def _order(self) -> Codes:
        order = self._by_score(np.arange(len(self)))
        return np.concatenate([[self._best], order[order != self._best]])
