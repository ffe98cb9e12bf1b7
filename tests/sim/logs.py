"""The log of one engine as it is stored at one moment, beside what the engine believed then."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import attrs

from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import EventDecoder
from kvledger.storage.events import FrameKind, read_log
from kvledger.storage.events.writer_lock import unlock

if TYPE_CHECKING:
    from kvledger.adapters.vllm.scheduler_side import SchedulerSide


@attrs.frozen(eq=False)
class LogEnd:
    """What is stored, and what should be."""

    configuration: LedgerConfiguration
    events: list[tuple[int, e.Event]]
    """Everything that was stored, up to the first gap."""
    gaps: list[tuple[int, int]]
    """(first sequence, number of events) of frames that stand for lost ones."""
    damage: list[str]
    next_stored_sequence: int
    next_committed_sequence: int
    num_events_backlogged: int
    num_events_lost: int
    snapshot: dict[str, object] | None
    """What the engine believed; None where it knew more than it had committed."""
    totals: bytes
    """What it counted."""
    is_in_files: bool


def read_end(side: SchedulerSide) -> LogEnd:
    """Read the log back as another process would, while its writer still has it open."""
    store: Any = side.log.store
    is_in_files = side.log.directory is not None
    reader: Any = read_log(side.log.directory) if is_in_files else None
    decoder = EventDecoder(Core.standard(), reader.header if is_in_files else store.header)
    events: list[tuple[int, e.Event]] = []
    gaps: list[tuple[int, int]] = []
    next_sequence = 1
    for frame in reader if is_in_files else store.read():
        next_sequence = frame.next_sequence
        if frame.kind is FrameKind.GAP:
            gaps.append((frame.first_sequence, frame.num_events))
        elif not gaps:
            events.extend(enumerate(decoder.decode(frame.payload), frame.first_sequence))
    ledger = side.ledger
    return LogEnd(
        ledger.projections.configuration,
        events,
        gaps,
        [damage.kind for damage in reader.damage] if is_in_files else [],
        next_sequence,
        ledger.next_sequence - ledger.num_uncommitted,
        getattr(store, "num_events_backlogged", 0),
        getattr(store, "num_events_lost", 0),
        None if ledger.num_uncommitted else ledger.projections.snapshot(),
        side.journal.totals.stored(),
        is_in_files,
    )


def abandon(side: SchedulerSide) -> None:
    """Let go of the log's files as the kernel does for a killed process: nothing is written any more."""
    store: Any = side.log.store
    segments = store._store
    os.close(segments._descriptor)
    unlock(segments._lock)
    segments._closed = store._closed = True
