"""What came of a run's engines: said once, and kept for its result."""

from __future__ import annotations

import logging

from autoplace.engines import Verdict
from autoplace.units import format_seconds

log = logging.getLogger(__name__)

# A one-off cost below this is no news.
_WORTH_SAYING_S = 1.0


class EngineLog:
    """Hears the verdicts of every process of a run.

    Attributes:
        verdicts: one for each engine, kind of step and outcome.
    """

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []

    def hear(self, verdict: Verdict) -> None:
        """Keep a verdict and say it, unless another process has said the same."""
        if any(_outcome(known) == _outcome(verdict) for known in self.verdicts):
            return
        self.verdicts.append(verdict)
        if verdict.dropped_because is not None:
            log.warning(
                "engine %s is dropped, each %s is eager: %s",
                verdict.engine,
                verdict.step,
                verdict.dropped_because,
            )
        elif verdict.one_off_s >= _WORTH_SAYING_S:
            log.warning(
                "engine %s took %s once to make the %s ready; one takes %s, an eager one %s",
                verdict.engine,
                format_seconds(verdict.one_off_s),
                verdict.step,
                format_seconds(verdict.engine_s),
                format_seconds(verdict.eager_s),
            )


def _outcome(verdict: Verdict) -> tuple[str, str, bool]:
    return verdict.engine, verdict.step, verdict.dropped_because is None
