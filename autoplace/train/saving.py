"""When a run is saved, and as what.

``latest``
    every 10 seconds, or less often where saving would take more than 1 % of the time, and at the
    end of a call; the one before it is kept.
``best``
    after the iteration with the highest mean return over the last 100 training episodes. While
    fewer than 100 have ended, a mean over more of them counts as better, whatever its value: the
    first few episodes say little. It is written with the next ``latest``.
``<env steps>``
    every ``checkpoint_every`` env steps, as of the end of the iteration that reaches them.
"""

from __future__ import annotations

import logging
import statistics
from typing import Any

from autoplace.device import now
from autoplace.errors import RunError
from autoplace.store import RunDir
from autoplace.train.checkpoint import (
    Progress,
    checkpoint_bytes,
    load_checkpoint,
    take_checkpoint,
)
from autoplace.train.learner import Learned
from autoplace.workload import Workload

log = logging.getLogger(__name__)

CHECKPOINT_INTERVAL_S = 10.0
_CHECKPOINT_SHARE = 0.01  # of the time that saving may take


class Saver:
    """Writes the checkpoints of one call of ``train``. A disk that is full costs none of them."""

    def __init__(
        self, run_dir: RunDir, workload: Workload, checkpoint_every: int | None, start: Progress
    ) -> None:
        self._run_dir = run_dir
        self._workload = workload
        self._every = checkpoint_every
        self._env_steps = start.env_steps
        self._best_rank = self._rank_on_disk()
        self._best: dict[str, Any] | None = None  # better than the one on the disk
        self._saved_s = now()
        self._save_cost_s = 0.0
        self._is_failing = False

    def end_iteration(self, learner: Learned, progress: Progress) -> None:
        """Save what is due; what cannot be written is said once and tried again later."""
        rank = _rank(progress)
        if rank > self._best_rank:
            self._best_rank = rank
            self._best = take_checkpoint(self._workload, learner, progress)
        before, self._env_steps = self._env_steps, progress.env_steps
        is_reached = self._every is not None and before // self._every < (
            progress.env_steps // self._every
        )
        due_s = max(CHECKPOINT_INTERVAL_S, self._save_cost_s / _CHECKPOINT_SHARE)
        is_due = now() - self._saved_s >= due_s
        if not (is_due or is_reached):
            return
        try:
            if is_reached:
                content = checkpoint_bytes(take_checkpoint(self._workload, learner, progress))
                self._run_dir.keep_checkpoint(str(progress.env_steps), content)
            if is_due:
                self.save(learner, progress)
            self._is_failing = False
        except RunError as fault:
            self._saved_s = now()
            if not self._is_failing:
                log.warning("%s; training goes on, with what was saved before", fault)
            self._is_failing = True

    def save(self, learner: Learned, progress: Progress) -> None:
        """Save the latest, and the best where it is new.

        Raises:
            RunError: one cannot be written; what was there before is as it was.
        """
        start_s = now()
        if self._best is not None:
            self._run_dir.keep_checkpoint("best", checkpoint_bytes(self._best))
            self._best = None
        content = take_checkpoint(self._workload, learner, progress)
        self._run_dir.save_checkpoint(checkpoint_bytes(content))
        self._saved_s = now()
        self._save_cost_s = self._saved_s - start_s

    def _rank_on_disk(self) -> tuple[int, float]:
        """Of the best checkpoint so far; a damaged one counts for nothing."""
        try:
            return _rank(load_checkpoint(self._run_dir.path, "best").progress)
        except RunError:
            return 0, 0.0


def _rank(progress: Progress) -> tuple[int, float]:
    """What makes one checkpoint better than another: episodes first, then their mean return."""
    returns = [episode_return for episode_return, _ in progress.recent_episodes]
    return len(returns), statistics.fmean(returns) if returns else 0.0
