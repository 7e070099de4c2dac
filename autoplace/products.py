"""Products as libraries compute them: sums of what grows with their sizes, in two regimes.

With ``(m, k) @ (k, n)``, a call costs something whatever the sizes, ``m k n`` is the arithmetic,
``k n``, ``m k`` and ``m n`` are operands and results read, packed and written, ``m``, ``k`` and
``n`` the loops around the innermost blocks. What whole vectors leave of the columns of the result,
or of its rows, takes vectors of half the length, a quarter and so on, and then single numbers: each
another pass over one operand. No more than that, but other rates, hold on either side of the size
where a library changes its algorithm: where it begins to pack its operands, or to use more than one
thread. That size, and what it is a size of, are learned. A single row is a third algorithm, which
streams the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_VECTOR = 16  # numbers of the longest vector
_SINGLE = 4  # fewer than so many are left to single numbers


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

    def contrast(self, m: float, k: float, n: float) -> float:
        """How many times as long such a product takes by the slower algorithm."""
        terms = terms_of(m, k, n)
        faster_s, slower_s = sorted(
            sum(rate * term for rate, term in zip(rates, terms, strict=True))
            for rates in (self.below, self.above)
        )
        return slower_s / faster_s

    def _rates(self, m: float, k: float, n: float) -> tuple[float, ...]:
        if m == 1 and self.single:
            return self.single
        reached = any(reaches((m, k, n), start) for start in self.starts)
        return self.above if reached else self.below


def reaches(shape: Sequence[float], start: Sequence[float]) -> bool:
    """Whether a product (m, k, n) is of a size, given as exponents of the three and the size."""
    (m, k, n), (a, b, c, size) = shape, start
    return bool(m**a * k**b * n**c >= size)


def terms_of(m: float, k: float, n: float) -> tuple[float, ...]:
    """What the seconds of a product are a sum of."""
    inputs, weights = m * k, k * n
    of_columns, of_rows = _left_over(n), _left_over(m)
    return (
        *(1.0, m * k * n, weights, inputs, m * n, m, k, n),
        *(inputs * passes for passes in of_columns),
        *(weights * passes for passes in of_rows),
    )


def _left_over(size: float) -> tuple[float, float]:
    """Shorter vectors, and single numbers, that make up what whole vectors leave of a size."""
    left = math.ceil(size) % _VECTOR
    return float(left.bit_count()), float(left % _SINGLE)
