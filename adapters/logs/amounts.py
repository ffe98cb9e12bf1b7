"""Numbers in English: counts, durations, sizes, times, runs of numbers. It must not know what they are of."""

from __future__ import annotations

from collections.abc import Iterable

_NS_PER_US, _NS_PER_MS, _NS_PER_S = 1_000, 1_000_000, 1_000_000_000


def plural(count: int, noun: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(nanoseconds: int) -> str:
    """A duration in its natural unit."""
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
    """A size in its natural binary unit."""
    for unit, num_bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << num_bits:
            return f"{num_bytes / (1 << num_bits):.1f} {unit}"
    return f"{num_bytes} B"


def written_size(num_bytes: int) -> str:
    """A size as it is written in a configuration: exact, in the largest unit in which it is a whole number."""
    units = (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10))
    unit, num_bits = next((each for each in units if num_bytes and not num_bytes % (1 << each[1])), ("B", 0))
    return f"{num_bytes >> num_bits}{unit}"


def milliseconds(time_ns: int) -> str:
    """A moment, in milliseconds since the log was opened."""
    return f"{time_ns / _NS_PER_MS:.3f}"


def event_range(first_sequence: int, last_sequence: int) -> str:
    """`7` or `7–9`."""
    return str(first_sequence) if first_sequence == last_sequence else f"{first_sequence}–{last_sequence}"


def ranges(numbers: Iterable[int]) -> str:
    """`0–2, 5` for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)
