"""Times of several logs on one HTML page: times of day if every log has its opening time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvledger.adapters.tools.export.axis import Axis, Tick
from kvledger.adapters.tools.export.part import Reading
from kvledger.adapters.tools.logs.clock import iso
from kvledger.adapters.units import milliseconds

_TICK_DISTANCE_IF_NARROW = 0.34
_NS_PER_S = 10**9


class PageClock:
    """Shows times of day if every log has its opening time; otherwise, for each log, the time since it was opened."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self.is_of_day = all(reading.clock.is_known for reading in readings)
        self._is_one_day = len({_day(self.at(each, at)) for each in readings for at in (0, each.now_ns)}) == 1

    def at(self, reading: Reading, time_ns: int) -> int:
        """Convert a time of a log to a time on the axis of the HTML page."""
        unix_ns = reading.clock.unix_ns(time_ns)
        return time_ns if unix_ns is None or not self.is_of_day else unix_ns

    def text(self, reading: Reading, time_ns: int) -> str:
        """Return the time as text for a table."""
        if not self.is_of_day:
            return milliseconds(time_ns)
        return reading.clock.date_and_time(time_ns)[11 if self._is_one_day else 5 : -1].replace("T", " ")

    def title(self, reading: Reading, time_ns: int) -> str:
        """Return the exact time as text for a tooltip."""
        time_of_day = f"{reading.clock.date_and_time(time_ns)}, " if reading.clock.is_known else ""
        return f"{time_of_day}{milliseconds(time_ns)} ms after {reading.log.path.name} was opened"

    def day(self, axis: Axis) -> str:
        """Return the label of the axis: the first day on the axis, or the unit of its times."""
        return f"{_day(axis.first_ns)} UTC" if self.is_of_day else "ms since opening"

    def labelled(self, axis: Axis, zoom: int) -> Iterator[tuple[Tick, str, bool]]:
        """Yield each tick with its label and whether the label also fits into a narrow window."""
        day = _day(axis.first_ns)
        room, distance = 0.0, _TICK_DISTANCE_IF_NARROW / zoom
        for tick in axis.ticks(zoom):
            is_main = room <= tick.share <= 1 - distance
            room = tick.share + distance if is_main else room
            if not self.is_of_day:
                yield tick, f"{tick.time_ns / 1e6:,.10g}", is_main
                continue
            before, day = day, _day(tick.time_ns)
            yield tick, f"{'' if day == before else f'{day[5:]} '}{time_of_day(tick)}", is_main


def time_of_day(tick: Tick) -> str:
    """Return the label of a tick whose time is a Unix time, with the precision of the tick."""
    text = iso(tick.time_ns)[11:19]
    if tick.step_ns >= _NS_PER_S:
        return text
    num_digits = 3 if tick.step_ns >= 10**6 else 6
    return text + f".{tick.time_ns % _NS_PER_S:09}"[: num_digits + 1]


def _day(unix_ns: int) -> str:
    return iso(unix_ns)[:10]
