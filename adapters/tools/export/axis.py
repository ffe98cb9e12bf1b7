"""A time axis on which long idle times are folded: computes the positions of moments, folds and ticks.

All times are nanoseconds of the same clock. This module must not depend on what is drawn along the axis.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence

import attrs

_FOLD_WIDTH = 0.03
"""Width of a fold, as a share of the axis. Idle time longer than twice this share of the busy time is folded."""
_MAX_FOLDED = 0.3
"""Largest total width of the folds, as a share of the axis."""
_TICK_DISTANCE = 0.11
"""Smallest distance between ticks, as a share of the axis, so that a time of day fits between them."""
_STEPS_NS = [
    *(base * 10**power for power in range(1, 10) for base in (1, 2, 5)),
    *(seconds * 10**9 for seconds in (10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 4 * 3600, 12 * 3600)),
    *(days * 86_400 * 10**9 for days in (1, 2, 7, 30, 100)),
]

Interval = tuple[int, int]
"""First and last time."""


@attrs.frozen
class Fold:
    """Idle time that is drawn as a narrow break."""

    first_ns: int
    last_ns: int
    share: float
    """Position of the fold's beginning on the axis, from 0 to 1."""
    width: float

    @property
    def duration_ns(self) -> int:
        """Length of the idle time."""
        return self.last_ns - self.first_ns


@attrs.frozen
class Tick:
    """A labelled moment."""

    time_ns: int
    share: float
    step_ns: int
    """Precision of the label, in nanoseconds. For a round moment, this is the distance to the next round moment. For
    any other moment, it is 1 ms or less."""


class Axis:
    """Maps times to positions from 0 to 1."""

    def __init__(self, busy: Iterable[Interval]) -> None:
        """Make an axis that shows the intervals in `busy` and folds long times between them. `busy` is not empty."""
        merged = _merged(busy)
        num_busy = sum(last - first for first, last in merged) or 1
        self._pieces = joined(merged, 2 * _FOLD_WIDTH * num_busy)
        num_folds = len(self._pieces) - 1
        self.first_ns, self.last_ns = self._pieces[0][0], self._pieces[-1][1]
        fold_width = min(_FOLD_WIDTH, _MAX_FOLDED / max(1, num_folds))
        drawn = sum(last - first for first, last in self._pieces) or 1
        self._per_ns = (1 - fold_width * num_folds) / drawn
        self._shares: list[float] = []
        self.folds: list[Fold] = []
        share = 0.0
        for index, (first, last) in enumerate(self._pieces):
            if index:
                self.folds.append(Fold(self._pieces[index - 1][1], first, share, fold_width))
                share += fold_width
            self._shares.append(share)
            share += (last - first) * self._per_ns
        self._drawn_ns = drawn
        self._begins = [first for first, _ in self._pieces]

    def share(self, time_ns: int) -> float:
        """Return the position of a time, from 0 to 1; times outside the axis are at its border."""
        index = bisect.bisect_right(self._begins, time_ns) - 1
        if index < 0:
            return 0.0
        first, last = self._pieces[index]
        if time_ns <= last:
            return min(1.0, self._shares[index] + (time_ns - first) * self._per_ns)
        if index >= len(self.folds):
            return 1.0
        fold = self.folds[index]
        return fold.share + fold.width * (time_ns - fold.first_ns) / fold.duration_ns

    def percent(self, time_ns: int, until_ns: int | None = None) -> str:
        """Return the position of a time in percent; with `until_ns`, the distance between the two times."""
        share = self.share(time_ns)
        if until_ns is not None:
            share = self.share(until_ns) - share
        return f"{share * 100:.4f}".rstrip("0").rstrip(".") + "%"

    def ticks(self, zoom: int = 1) -> Iterator[Tick]:
        """Yield the moments to label: the first moment, the end of each fold, and round moments if there is room.

        Args:
            zoom: width of the axis divided by the width of its window.
        """
        distance = _TICK_DISTANCE / zoom
        step = next((step for step in _STEPS_NS if self._drawn_ns * distance <= step), _STEPS_NS[-1])
        room = 0.0
        for (first, last), begin in zip(self._pieces, self._shares, strict=True):
            following = self._shares[bisect.bisect_right(self._shares, begin) :]
            limit = (following[0] if following else 1.0) - distance
            for time_ns in (first, *range((first // step + 1) * step, last + 1, step)):
                share = self.share(time_ns)
                if share >= room and (time_ns == first or share <= limit):  # a label is to the right of its tick
                    yield Tick(time_ns, share, step if time_ns % step == 0 else min(step, 10**6))
                    room = share + distance


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for first, last in sorted(intervals):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def joined(intervals: Sequence[Interval], longest_ns: float) -> list[Interval]:
    """Return the intervals. Neighbours that are at most `longest_ns` apart are joined."""
    pieces = [intervals[0]]
    for first, last in intervals[1:]:
        if first - pieces[-1][1] <= longest_ns:
            pieces[-1] = (pieces[-1][0], last)
        else:
            pieces.append((first, last))
    return pieces
