"""Products as libraries compute them: sums of what grows with their sizes, in two regimes.

With ``(m, k) @ (k, n)``, a call costs something whatever the sizes, ``m k n`` is the arithmetic,
``k n``, ``m k`` and ``m n`` are operands and results read, packed and written, ``m``, ``k`` and
``n`` the loops around the innermost blocks. No more than that, but other rates, hold on either side
of the size where a library changes its algorithm: where it begins to pack its operands, or to use
more than one thread. That size, and what it is a size of, are learned. A single row is a third
algorithm, which streams the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Regimes:
    """Seconds of a product.

    Attributes:
        single: seconds of a single row per call and per unit of each other term; empty where it
            was not timed.
        starts: exponents of m, k and n, and the size from which ``above`` holds; several such.
        below: likewise where no product's size reaches any of these.
        above: likewise where one does.
    """

    single: tuple[float, ...]
    starts: tuple[tuple[float, ...], ...]
    below: tuple[float, ...]
    above: tuple[float, ...]

    @property
    def fixed_s(self) -> float:
        """Seconds of a call of the smallest products."""
        return self.below[0]

    def call_s(self, m: float, k: float, n: float) -> float:
        """Seconds of a call of such a product, apart from its work."""
        return self._rates(m, k, n)[0]

    def work_s(self, m: float, k: float, n: float) -> float:
        """Seconds without those of the call."""
        rates, terms = self._rates(m, k, n), terms_of(m, k, n)
        return sum(rate * term for rate, term in zip(rates[1:], terms[1:], strict=True))

    def slopes_s(self, m: float, k: float, n: float) -> tuple[float, float, float]:
        """Derivatives of that by the logarithms of what k n, m k and m n cost."""
        _, _, by_weights, by_inputs, by_outputs, *_ = self._rates(m, k, n)
        return by_weights * k * n, by_inputs * m * k, by_outputs * m * n

    def _rates(self, m: float, k: float, n: float) -> tuple[float, ...]:
        if m == 1 and self.single:
            return self.single
        reached = any(m**a * k**b * n**c >= start for a, b, c, start in self.starts)
        return self.above if reached else self.below


def terms_of(m: float, k: float, n: float) -> tuple[float, ...]:
    """What the seconds of a product are a sum of."""
    return 1.0, m * k * n, k * n, m * k, m * n, m, k, n
