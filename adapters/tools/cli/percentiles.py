"""Computes percentiles of any number of values in bounded memory: counts the values, rounded to three digits."""

from __future__ import annotations

import math
from collections import Counter

import attrs


@attrs.define
class Percentiles:
    """Percentiles of non-negative values, with an error of at most 1 %. Count, sum and maximum are exact."""

    sum: int = 0
    max: int = 0
    _counts: Counter[int] = attrs.field(factory=Counter)

    @property
    def count(self) -> int:
        """Number of values."""
        return self._counts.total()

    def add(self, value: int) -> None:
        """Count a value. A negative value counts as 0."""
        value = max(0, value)
        self.sum += value
        self.max = max(self.max, value)
        self._counts[round(value, 3 - len(str(value)))] += 1

    def merge(self, other: Percentiles) -> None:
        """Add the values of `other`."""
        self.sum += other.sum
        self.max = max(self.max, other.max)
        self._counts += other._counts

    def at(self, share: float) -> int:
        """Return the smallest counted value for which at least `share` (0 to 1) of all values are as large or smaller.

        0 if there are no values.
        """
        left = math.ceil(share * self._counts.total())
        for value in sorted(self._counts):
            left -= self._counts[value]
            if left <= 0:
                return min(self.max, value)
        return 0

    def summary(self) -> dict[str, int]:
        """Return name → value: `count`, `sum`, `p50`, `p90`, `p99`, `max`."""
        percentiles = {f"p{per_cent}": self.at(per_cent / 100) for per_cent in (50, 90, 99)}
        return {"count": self.count, "sum": self.sum, **percentiles, "max": self.max}
