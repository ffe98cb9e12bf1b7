"""Percentiles of any number of values in bounded memory: counts in buckets whose width grows with the value.

A value is known to 1 % then, whatever its size (as in DDSketch); count, sum and the greatest are exact.
"""

from __future__ import annotations

import math
from collections import Counter

import attrs

RELATIVE_ERROR = 0.01
_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_OF_GROWTH = math.log(_GROWTH)


@attrs.define
class Percentiles:
    """Of values that are not negative; about 2,200 buckets hold everything up to 2**63."""

    count: int = 0
    sum: int = 0
    max: int = 0
    _num_zeros: int = 0
    _buckets: Counter[int] = attrs.field(factory=Counter)

    def add(self, value: int) -> None:
        """Count a value; a negative one counts as 0."""
        self.count += 1
        if value <= 0:
            self._num_zeros += 1
            return
        self.sum += value
        self.max = max(self.max, value)
        self._buckets[math.ceil(math.log(value) / _LOG_OF_GROWTH)] += 1

    def merge(self, other: Percentiles) -> None:
        """Count what another one counted, too."""
        self.count += other.count
        self.sum += other.sum
        self.max = max(self.max, other.max)
        self._num_zeros += other._num_zeros
        self._buckets += other._buckets

    def at(self, share: float) -> int:
        """The value that `share` (0 to 1) of all values do not exceed, within 1 %; 0 where there are none."""
        left = math.ceil(share * self.count) - self._num_zeros
        if left <= 0:
            return 0
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                middle = 2 * _GROWTH**bucket / (_GROWTH + 1)
                return min(self.max, round(middle))
        return self.max

    def summary(self) -> dict[str, int]:
        """As a JSON object."""
        return {
            "count": self.count,
            "sum": self.sum,
            "p50": self.at(0.5),
            "p90": self.at(0.9),
            "p99": self.at(0.99),
            "max": self.max,
        }
