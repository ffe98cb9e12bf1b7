"""Converts times since a log was opened to times of day in UTC. The log's header has the opening time."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Final

from kvledger.lifecycle.ranges import MAX_NS

_NS_PER_S: Final = 1_000_000_000
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class Clock:
    """Converts the times of a log to times of day."""

    def __init__(self, header: Mapping[str, object]) -> None:
        opened_at = header.get("opened_at_unix_ns")
        self._opened_ns = opened_at if isinstance(opened_at, int) and 0 <= opened_at <= MAX_NS else None
        self._day = ""

    @property
    def is_known(self) -> bool:
        """Whether the log's header has the opening time."""
        return self._opened_ns is not None

    def unix_ns(self, time_ns: int | None) -> int | None:
        """Convert a time since the log was opened to nanoseconds since 1970; None if either time is unknown."""
        return None if self._opened_ns is None or time_ns is None else self._opened_ns + time_ns

    def date_and_time(self, time_ns: int) -> str:
        """Return the date and time, for example `2026-01-05T10:30:00.101Z`; empty if unknown."""
        at_ns = self.unix_ns(time_ns)
        return "" if at_ns is None else iso(at_ns)

    def time_of_day(self, time_ns: int) -> str:
        """Return the time of day, for example `10:30:00.101`; empty if unknown."""
        return self.date_and_time(time_ns)[11:-1]

    def new_day(self, time_ns: int) -> str:
        """Return the day, for example `2026-01-05`; empty if the previous call was about the same day."""
        before, self._day = self._day, self.date_and_time(time_ns)[:10]
        return self._day if self._day != before else ""


def iso(unix_ns: int) -> str:
    """Return the time as text cut to milliseconds, for example `2026-01-05T10:30:00.101Z`; empty if out of range."""
    try:
        at = _EPOCH + dt.timedelta(seconds=unix_ns // _NS_PER_S, milliseconds=unix_ns % _NS_PER_S // 1_000_000)
    except OverflowError:
        return ""
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03}Z"
