"""Sizes and durations as they are written on the command line. It must not know what they are for."""

from __future__ import annotations

import argparse
import re
from typing import Final

_UNIT_NS: Final = {
    "ns": 1,
    "us": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
    "d": 86400 * 10**9,
    "w": 7 * 86400 * 10**9,
}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ns|us|ms|s|m|h|d|w)")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)


def duration_ns(text: str) -> int | None:
    """Return `90s`, `1h30m`, `30d` or `4w` in nanoseconds, None if it is no duration."""
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(round(float(number) * _UNIT_NS[unit]) for number, unit in parts)


def seconds(text: str) -> float:
    """Return a duration in seconds. Raises `argparse.ArgumentTypeError` if it is none."""
    found = duration_ns(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration; give numbers with s, m, h, d or w, as in 30d or 1h30m"
        )
    return found / 1e9


def num_bytes(text: str) -> int:
    """Return `1048576`, `500MiB`, `2.5GiB` or `2G` in bytes. As in the connector's settings, only KiB is 1024 bytes.

    Raises:
        argparse.ArgumentTypeError: it is no size.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        message = (
            f"{text!r} is not a size; give bytes, or a number with K, M, G, T (powers of 1000) or KiB, MiB, GiB, TiB"
        )
        raise argparse.ArgumentTypeError(message)
    number, unit, is_binary = found.groups()
    exponent = 0 if unit is None else 1 + "kmgt".index(unit.lower())
    return int(float(number) * (1024 if is_binary else 1000) ** exponent)
