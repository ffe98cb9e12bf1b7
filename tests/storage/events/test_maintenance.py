"""What follows a new segment keeps no append waiting for a snapshot, and keeps the log to its limits meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

from kvledger.storage.events import Maintenance, SegmentEventStore
from kvledger.storage.events.segment_file import segment_paths

_SEGMENT_BYTES = 1000


class _SlowMaker:
    """Makes a snapshot when it is allowed to, one call at a time, and notes which segments it saw."""

    def __init__(self) -> None:
        self.allowed = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.seen: list[list[Path]] = []
        self._is_stopped = False

    def make(self, directory: Path) -> None:
        """Wait until it is allowed or stopped."""
        if not self._is_stopped:
            self.seen.append(segment_paths(directory))
            self.begun.release()
            self.allowed.acquire()

    def stop(self) -> None:
        """Let go whoever waits."""
        self._is_stopped = True
        self.allowed.release()


def _store(log: Path, maker: _SlowMaker, max_bytes: int | None = None) -> SegmentEventStore:
    maintenance = Maintenance(max_bytes, snapshots=maker)
    return SegmentEventStore.create(log, {}, segment_bytes=_SEGMENT_BYTES, maintenance=maintenance)


def _fill(store: SegmentEventStore, num_segments: int) -> None:
    segments = {store.segment}
    while len(segments) <= num_segments:
        store.append(bytes(90), 2)
        segments.add(store.segment)


def test_an_append_does_not_wait_for_a_snapshot_and_neither_does_retention(tmp_path: Path) -> None:
    """Segments are begun while the maker stands still, and no more stay than may; then it looks once more."""
    maker, log = _SlowMaker(), tmp_path / "log"
    store = _store(log, maker, max_bytes=3 * _SEGMENT_BYTES)
    maker.begun.acquire()
    _fill(store, 9)
    assert len(segment_paths(log)) <= 4
    maker.allowed.release()
    maker.begun.acquire()
    assert store.segment in maker.seen[1]
    store.close()
    assert len(maker.seen) == 2, "nothing has happened since"


def test_a_log_that_is_closed_waits_for_no_snapshot(tmp_path: Path) -> None:
    """The maker is stopped, not waited for; a later look at the log can make what is missing."""
    maker = _SlowMaker()
    store = _store(tmp_path / "log", maker)
    maker.begun.acquire()
    _fill(store, 2)
    store.close()
    assert len(maker.seen) == 1
