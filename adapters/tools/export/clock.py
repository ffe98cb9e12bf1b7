"""The times of several logs on one page: of day, where every log knows when it was opened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvledger.adapters.tools.export.axis import Axis, Tick
from kvledger.adapters.tools.export.part import Reading
from kvledger.adapters.tools.logs.clock import iso
from kvledger.adapters.units import milliseconds

_TICK_DISTANCE_IF_NARROW = 0.34
_NS_PER_S = 10**9


class PageClock:
    """Times of day, where every log knows when it was opened; else times since each was opened, side by side."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self.is_of_day = all(reading.clock.is_known for reading in readings)
        self._is_one_day = len({_day(self.at(each, at)) for each in readings for at in (0, each.now_ns)}) == 1

    def at(self, reading: Reading, time_ns: int) -> int:
        """On the axis."""
        unix_ns = reading.clock.unix_ns(time_ns)
        return time_ns if unix_ns is None or not self.is_of_day else unix_ns

    def text(self, reading: Reading, time_ns: int) -> str:
        """For a table."""
        if not self.is_of_day:
            return milliseconds(time_ns)
        return reading.clock.date_and_time(time_ns)[11 if self._is_one_day else 5 : -1].replace("T", " ")

    def title(self, reading: Reading, time_ns: int) -> str:
        """For who looks closer."""
        time_of_day = f"{reading.clock.date_and_time(time_ns)}, " if reading.clock.is_known else ""
        return f"{time_of_day}{milliseconds(time_ns)} ms after {reading.log.path.name} was opened"

    def day(self, axis: Axis) -> str:
        """What the axis begins with."""
        return f"{_day(axis.first_ns)} UTC" if self.is_of_day else "ms since opening"

    def labelled(self, axis: Axis, zoom: int) -> Iterator[tuple[Tick, str, bool]]:
        """Yield the ticks with their labels, and whether a narrow window has room for them."""
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
    """The label of a tick whose time counts from 1970, as exact as it says."""
    text = iso(tick.time_ns)[11:19]
    if tick.step_ns >= _NS_PER_S:
        return text
    num_digits = 3 if tick.step_ns >= 10**6 else 6
    return text + f".{tick.time_ns % _NS_PER_S:09}"[: num_digits + 1]


def _day(unix_ns: int) -> str:
    return iso(unix_ns)[:10]
