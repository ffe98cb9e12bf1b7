"""The event store: append-only frames of bytes in one gapless, hash-chained sequence.

`SegmentEventStore` writes to disk, `MemoryEventStore` to memory. `BacklogEventStore` wraps one of these stores and
keeps I/O errors from the engine. `read_log` reads a log. `kvledger.lifecycle.codec` encodes and decodes the events in
a frame's payload.
"""

from __future__ import annotations

from kvledger.storage.events.backlog import BacklogEventStore
from kvledger.storage.events.ending import (
    HowEnded,
    LogEnding,
    MissingEnd,
    glance_at_ending,
    is_being_written,
    judge_ending,
    read_ending,
)
from kvledger.storage.events.frames import Frame, FrameKind
from kvledger.storage.events.late import LateEventStore
from kvledger.storage.events.maintenance import MAX_EXCESS_SEGMENTS, MIN_LOG_SEGMENTS, Maintenance, SnapshotMaker
from kvledger.storage.events.memory import MemoryEventStore
from kvledger.storage.events.reader import Damage, LogReader, read_log
from kvledger.storage.events.retention import make_room, retire, retire_logs
from kvledger.storage.events.retirements import Retirement
from kvledger.storage.events.segments import SegmentEventStore
from kvledger.storage.events.snapshots import (
    Snapshot,
    find_snapshot,
    load_snapshot,
    segments_without_snapshot,
    usable_snapshot,
    write_snapshot,
)
from kvledger.storage.events.store import (
    AppendConflict,
    Durability,
    EventStore,
    LogClosed,
    LogDamaged,
    LogError,
    LogLocked,
    LogTooNew,
)

__all__ = [
    "MAX_EXCESS_SEGMENTS",
    "MIN_LOG_SEGMENTS",
    "AppendConflict",
    "BacklogEventStore",
    "Damage",
    "Durability",
    "EventStore",
    "Frame",
    "FrameKind",
    "HowEnded",
    "LateEventStore",
    "LogClosed",
    "LogDamaged",
    "LogEnding",
    "LogError",
    "LogLocked",
    "LogReader",
    "LogTooNew",
    "Maintenance",
    "MemoryEventStore",
    "MissingEnd",
    "Retirement",
    "SegmentEventStore",
    "Snapshot",
    "SnapshotMaker",
    "find_snapshot",
    "glance_at_ending",
    "is_being_written",
    "judge_ending",
    "load_snapshot",
    "make_room",
    "read_ending",
    "read_log",
    "retire",
    "retire_logs",
    "segments_without_snapshot",
    "usable_snapshot",
    "write_snapshot",
]
