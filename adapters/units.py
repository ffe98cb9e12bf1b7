"""Formats sizes, durations and counts for people, and reads sizes and durations that people write.

The connector, the recorder and every command import this module, so it imports none of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_NS_PER_US, _NS_PER_MS, _NS_PER_S = 1_000, 1_000_000, 1_000_000_000
_UNIT_NS: Final = {
    "ns": 1,
    "us": _NS_PER_US,
    "ms": _NS_PER_MS,
    "s": _NS_PER_S,
    "m": 60 * _NS_PER_S,
    "h": 3600 * _NS_PER_S,
    "d": 86400 * _NS_PER_S,
    "w": 7 * 86400 * _NS_PER_S,
}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ns|us|ms|s|m|h|d|w)")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)


def read_duration_ns(text: str) -> int | None:
    """Return a duration such as `90s`, `1h30m`, `30d` or `4w` in nanoseconds; None if the text is no duration."""
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(round(float(number) * _UNIT_NS[unit]) for number, unit in parts)


def read_size(text: str) -> int | None:
    """Return a size such as `1048576`, `500MiB`, `2.5GiB` or `2G` in bytes; None if the text is no size.

    1KiB is 1024 bytes, 1K and 1KB are 1000 bytes, as in the connector's settings.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    number, unit, is_binary = found.groups()
    exponent = 0 if unit is None else 1 + "kmgt".index(unit.lower())
    return int(float(number) * (1024 if is_binary else 1000) ** exponent)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as `1 block` or `2 blocks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(nanoseconds: int) -> str:
    """Return a duration as text, in the unit that suits its length."""
    if nanoseconds < _NS_PER_MS:
        return f"{nanoseconds / _NS_PER_US:.1f} µs"
    if nanoseconds < _NS_PER_S:
        return f"{nanoseconds / _NS_PER_MS:.1f} ms"
    if nanoseconds < 100 * _NS_PER_S:
        return f"{nanoseconds / _NS_PER_S:.2f} s"
    minutes, seconds = divmod(nanoseconds // _NS_PER_S, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def size(num_bytes: int) -> str:
    """Return a size as text, in the largest of GiB, MiB and KiB that it reaches, else in B."""
    for unit, num_bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << num_bits:
            return f"{num_bytes / (1 << num_bits):.1f} {unit}"
    return f"{num_bytes} B"


def written_size(num_bytes: int) -> str:
    """Return a size as text for a configuration: exact, in the largest unit that gives a whole number."""
    units = (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10))
    unit, num_bits = next((each for each in units if num_bytes and not num_bytes % (1 << each[1])), ("B", 0))
    return f"{num_bytes >> num_bits}{unit}"


def milliseconds(time_ns: int) -> str:
    """Return a time since the opening of the log as text, in milliseconds."""
    return f"{time_ns / _NS_PER_MS:.3f}"


def event_range(first_sequence: int, last_sequence: int) -> str:
    """Return a range of sequence numbers as text, such as `7` or `7–9`."""
    return str(first_sequence) if first_sequence == last_sequence else f"{first_sequence}–{last_sequence}"


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as text, with runs shortened: `0–2, 5` for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)
