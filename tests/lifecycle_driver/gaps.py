"""Reads a log of which some events are missing."""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.lifecycle.reader import Reader
from kvledger.lifecycle.replay import SequencedEvent


def take_with_gap(reader: Reader, events: Iterable[SequencedEvent], gap: tuple[int, int] | None) -> None:
    """Give a reader the events without those of the gap (first and last sequence number), of which it is told."""
    for sequence, event in events:
        if gap is not None and sequence == gap[0]:
            reader.lost(*gap)
        if gap is None or not gap[0] <= sequence <= gap[1]:
            reader.take([(sequence, event)])
