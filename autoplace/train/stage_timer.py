"""Seconds by stage and lane, as the host's clock saw them."""

from __future__ import annotations

from array import array
from collections import defaultdict

import numpy as np

Key = tuple[str, str]  # (stage name, lane), as in a plan


class StageTimer:
    """Collects the seconds of each stage over an iteration, and keeps every iteration.

    What a lane did not spend in a stage is its ``wait``, so each lane's stages sum to the time of
    the iteration, as they do in a plan.
    """

    def __init__(self) -> None:
        self._current: defaultdict[Key, float] = defaultdict(float)
        # Of every iteration, and compact: a long run has millions.
        self._stage_s: dict[Key, array[float]] = {}
        self._iteration_s = array("d")

    def add(self, name: str, lane: str, seconds: float) -> None:
        """Account ``seconds`` to a stage of the iteration in progress."""
        self._current[name, lane] += seconds

    def take(self) -> dict[Key, float]:
        """The stages of the iteration in progress, which starts anew."""
        stages = dict(self._current)
        self._current.clear()
        return stages

    def end_iteration(self, iteration_s: float) -> dict[Key, float]:
        """Close the iteration and return its stages, waits included."""
        stages = self.take()
        for lane in dict.fromkeys(lane for _, lane in stages):
            busy_s = sum(s for (_, of), s in stages.items() if of == lane)
            stages["wait", lane] = max(0.0, iteration_s - busy_s)
        for key in stages:
            if key not in self._stage_s:
                self._stage_s[key] = array("d", bytes(8 * len(self._iteration_s)))  # zeros so far
        for key, seconds in self._stage_s.items():
            seconds.append(stages.get(key, 0.0))
        self._iteration_s.append(iteration_s)
        return stages

    @property
    def _steady(self) -> slice:
        """The iterations after the first, which warms caches and allocators up."""
        return slice(1 if len(self._iteration_s) > 1 else 0, None)

    def stage_s(self) -> dict[Key, float]:
        """Median seconds of each stage per iteration; the first iteration is left out."""
        steady = self._steady
        return {key: float(np.median(seconds[steady])) for key, seconds in self._stage_s.items()}

    def iteration_s(self) -> float:
        """Median seconds of an iteration; the first is left out. 0 where none is complete."""
        kept = self._iteration_s[self._steady]
        return float(np.median(kept)) if kept else 0.0
