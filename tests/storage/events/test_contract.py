"""Every store keeps the promises of `EventStore`: the shipped conformance kit, run on each of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvledger.storage.events import BacklogEventStore, Durability, EventStore, MemoryEventStore, SegmentEventStore
from kvledger.storage.events.testing import EventStoreContract


def _open_segments(
    path: Path, durability: Durability = Durability.OS, segment_bytes: int = 64 << 20
) -> SegmentEventStore:
    if any(path.glob("*.kvlog")):
        return SegmentEventStore.open(path, durability, segment_bytes)
    return SegmentEventStore.create(path, {"made_by": "test"}, durability, segment_bytes)


class TestMemoryEventStore(EventStoreContract):
    """The list in memory."""

    survives_closing = False

    def open_store(self, path: Path) -> EventStore:
        """Make an empty log."""
        del path
        return MemoryEventStore({"made_by": "test"})


class TestSegmentEventStore(EventStoreContract):
    """The directory of segments."""

    def open_store(self, path: Path) -> EventStore:
        """Create or open."""
        return _open_segments(path)


@pytest.mark.filterwarnings("error")
class TestSegmentEventStoreOnDisk(EventStoreContract):
    """The directory of segments, with grouped `fdatasync`."""

    def open_store(self, path: Path) -> EventStore:
        """Create or open."""
        return _open_segments(path, Durability.DISK)


class TestBacklogEventStore(EventStoreContract):
    """A backlog that has nothing to do changes nothing."""

    def open_store(self, path: Path) -> EventStore:
        """Create or open."""
        return BacklogEventStore(_open_segments(path))


class TestSmallestSegments(EventStoreContract):
    """One frame a segment: each header block is part of the chain, so only the chain test differs."""

    def open_store(self, path: Path) -> EventStore:
        """Create or open."""
        return _open_segments(path, segment_bytes=1)

    test_the_chain_goes_through_every_frame = None  # type: ignore[assignment]
    test_open_append_close_open_append_verifies = None  # type: ignore[assignment]
