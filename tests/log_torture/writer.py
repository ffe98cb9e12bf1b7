"""A writer whose every byte can be foretold, and which tells what it was promised before it goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs

from kvledger.storage.events import Durability, Maintenance, SegmentEventStore

Acknowledge = Callable[[int], None]
"""Told the last sequence number that its durability level has: at each append with `os`, at each flush with `disk`."""


@attrs.frozen
class Plan:
    """What a writer does with a log: create it, append, close it."""

    durability: Durability = Durability.OS
    segment_bytes: int = 540
    num_appends: int = 12
    flush_every: int = 3
    max_bytes: int | None = None
    """What the log may take; its closed segments are compressed. None: nothing maintains the log."""


def payload_of(sequence: int) -> bytes:
    """What stands at a sequence number, whoever writes it and however often."""
    return b"%d:" % sequence * (sequence * 7919 % 37)


def num_events_of(sequence: int) -> int:
    """How many events the frame has that begins there."""
    return 1 + sequence % 3


def write(directory: Path, plan: Plan, acknowledge: Acknowledge) -> None:
    """Carry out the plan."""
    maintenance = None if plan.max_bytes is None else Maintenance(plan.max_bytes)
    store = SegmentEventStore.create(
        directory, {"block_size": 16}, plan.durability, plan.segment_bytes, 60_000, maintenance
    )
    for number in range(plan.num_appends):
        sequence = store.next_sequence
        if sequence % 11 == 7:
            store.append_gap(num_events_of(sequence), payload_of(sequence).decode())
        else:
            store.append(payload_of(sequence), num_events_of(sequence), expected_sequence=sequence)
        if plan.durability is Durability.OS:
            acknowledge(store.next_sequence - 1)
        elif number % plan.flush_every == 0:
            store.flush()
            acknowledge(store.next_sequence - 1)
    last = store.next_sequence - 1
    store.close()
    acknowledge(last)
