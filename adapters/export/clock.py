"""The times of several logs on one page: of day, where every log knows when it was opened."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence

from kvledger.adapters.export.axis import Axis, Tick, time_of_day
from kvledger.adapters.export.part import Reading
from kvledger.adapters.logs.amounts import milliseconds

_TICK_DISTANCE_IF_NARROW = 0.34


class Clock:
    """Times of day, where every log knows when it was opened; else times since each was opened, side by side."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self.is_of_day = all(reading.opened_ns is not None for reading in readings)
        self._days = {
            self._moment(at // 10**9).date()
            for each in readings
            for at in (self.at(each, 0), self.at(each, each.now_ns))
        }

    def at(self, reading: Reading, time_ns: int) -> int:
        """On the axis."""
        return (reading.opened_ns or 0) + time_ns if self.is_of_day else time_ns

    def text(self, reading: Reading, time_ns: int) -> str:
        """For a table."""
        if not self.is_of_day:
            return milliseconds(time_ns)
        at = self.at(reading, time_ns)
        date = f"{self._moment(at // 10**9):%m-%d} " if len(self._days) > 1 else ""
        return f"{date}{self._moment(at // 10**9):%H:%M:%S}.{at % 10**9 // 10**6:03}"

    def title(self, reading: Reading, time_ns: int) -> str:
        """For who looks closer."""
        offset = f"{milliseconds(time_ns)} ms after {reading.log.path.name} was opened"
        if not self.is_of_day:
            return offset
        at = self.at(reading, time_ns)
        return f"{self._moment(at // 10**9):%Y-%m-%d %H:%M:%S}.{at % 10**9 // 10**3:06} UTC, {offset}"

    def day(self, axis: Axis) -> str:
        """What the axis begins with."""
        return f"{self._moment(axis.first_ns // 10**9):%Y-%m-%d} UTC" if self.is_of_day else "ms since opening"

    @staticmethod
    def _moment(unix_s: int) -> dt.datetime:
        return dt.datetime.fromtimestamp(unix_s, tz=dt.UTC)


def labelled(axis: Axis, clock: Clock) -> Iterator[tuple[Tick, str, bool]]:
    """The ticks with their labels, and which of them a narrow window has room for."""
    day: dt.date | None = None
    room = 0.0
    for tick in axis.ticks():
        is_main = room <= tick.share <= 1 - _TICK_DISTANCE_IF_NARROW
        room = tick.share + _TICK_DISTANCE_IF_NARROW if is_main else room
        if clock.is_of_day:
            yield tick, time_of_day(tick, day), is_main
            day = dt.datetime.fromtimestamp(tick.time_ns // 10**9, tz=dt.UTC).date()
        else:
            yield tick, f"{tick.time_ns / 1e6:,.10g}", is_main
