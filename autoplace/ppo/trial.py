"""The first steps of an engine, each computed by the eager engine too and compared."""

from __future__ import annotations

from collections.abc import Callable

from autoplace import device as devices
from autoplace.engines import NUMPY, Verdict
from autoplace.errors import brief
from autoplace.units import format_percent, format_seconds

Hear = Callable[[Verdict], None]

# Steps that are compared. The first of them makes the engine ready and has no say in its time.
STEPS = 6
# By how much of an eager step's effect another engine's may differ: rounding stays well below, and
# what is wrong in a term or a coefficient of the loss lies above.
TOLERANCE = 0.01


class Trial:
    """Collects the first steps of one engine and says what comes of it.

    Attributes:
        is_over: whether the verdict is known.
        is_dropped: whether that is to go on eager.
    """

    def __init__(
        self, engine: str, step: str, device: str, hear: Hear, *, steps: int = STEPS
    ) -> None:
        """Try ``engine`` at ``steps`` of a kind on a device and tell ``hear`` of the verdict."""
        self._steps = steps
        self.is_over = self.is_dropped = False
        self._engine, self._step, self._device, self._hear = engine, step, device, hear
        self._eager_s: list[float] = []
        self._engine_s: list[float] = []
        if not devices.spawns_processes():
            self._end("a virtual clock cannot see its work")

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds of ``work``, with the device waited for before and after."""
        devices.synchronize(self._device)
        start_s = devices.now()
        work()
        devices.synchronize(self._device)
        return devices.now() - start_s

    def add(self, eager_s: float, engine_s: float, difference: float) -> None:
        """Count a step that both have computed.

        Args:
            eager_s: seconds of the eager one.
            engine_s: of the engine's.
            difference: between their effects, over the size of the eager one's; NaN where that has
                none to compare.
        """
        self._eager_s.append(eager_s)
        self._engine_s.append(engine_s)
        if difference > TOLERANCE:
            shown = format_percent(difference) if difference < 1e3 else "far more than 100 %"
            self._end(f"it differs from eager by {shown} of a {self._step}")
        elif len(self._engine_s) == self._steps:
            engine, eager = min(self._engine_s[1:]), min(self._eager_s[1:])
            # The numpy engine's time is known from the calibration, where that has chosen it.
            if self._engine != NUMPY and engine > eager:
                self._end(
                    f"a {self._step} takes {format_seconds(engine)}, an eager one "
                    f"{format_seconds(eager)}"
                )
            else:
                self._end(None)

    def fail(self, error: Exception) -> None:
        """Count a step that the engine has not been able to compute."""
        self._end(brief(error))

    def _end(self, reason: str | None) -> None:
        self.is_over, self.is_dropped = True, reason is not None
        later = self._engine_s[1:]
        typical_s = min(later, default=0.0)
        self._hear(
            Verdict(
                engine=self._engine,
                step=self._step,
                dropped_because=reason,
                one_off_s=max(0.0, self._engine_s[0] - typical_s) if self._engine_s else 0.0,
                engine_s=typical_s,
                eager_s=min(self._eager_s[1:], default=0.0),
            )
        )
