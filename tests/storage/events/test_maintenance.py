"""What follows a new segment keeps no append waiting for a snapshot, and keeps the log to its limits meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

from kvledger.storage.events import (
    MAX_EXCESS_SEGMENTS,
    LogError,
    Maintenance,
    SegmentEventStore,
    Snapshot,
    segments_without_snapshot,
    write_snapshot,
)
from kvledger.storage.events.retirements import read_retirements
from kvledger.storage.events.segment_file import read_header, segment_paths
from kvledger.storage.events.snapshots import has_snapshot

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
    assert len(segment_paths(log)) <= 3 + MAX_EXCESS_SEGMENTS
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


class _Maker(_SlowMaker):
    """Makes each snapshot that is missing, with no state in it; it cannot where a segment before is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.made = threading.Semaphore(0)

    def make(self, directory: Path) -> None:
        """As in `SnapshotMaker`."""
        super().make(directory)
        for segment in segments_without_snapshot(directory):
            header = read_header(segment)
            snapshot = Snapshot(header.log_id, header.first_sequence - 1, header.previous_head_hash, "", b"", b"")
            write_snapshot(segment, snapshot)
        self.made.release()


def test_retention_waits_for_the_snapshot_from_which_the_rest_is_read(tmp_path: Path) -> None:
    """Two servers on one directory left logs without a beginning and without a snapshot, which nobody could check."""
    maker, log = _Maker(), tmp_path / "log"
    store = _store(log, maker, max_bytes=3 * _SEGMENT_BYTES)
    maker.begun.acquire()
    _fill(store, MAX_EXCESS_SEGMENTS)
    assert segment_paths(log)[0].name == f"{1:020d}.kvlog", "nothing goes before the rest can be read without it"
    for _ in range(3):
        maker.allowed.release()
    maker.begun.acquire()
    _fill(store, 4)
    store.close()
    retired = read_retirements(log)
    assert retired
    assert all(each.is_rest_verifiable for each in retired)
    assert has_snapshot(segment_paths(log)[0])


def test_beyond_the_excess_segments_go_and_the_record_says_what_is_not_verifiable(tmp_path: Path) -> None:
    """No snapshot is ever made; the logs keep to the limit and the excess, and the record is honest."""
    maker, log = _SlowMaker(), tmp_path / "log"
    store = _store(log, maker, max_bytes=3 * _SEGMENT_BYTES)
    maker.begun.acquire()
    sizes = []
    for _ in range(200):
        store.append(bytes(90), 2)
        sizes.append(sum(path.stat().st_size for path in segment_paths(log) if path.exists()))
    store.close()
    assert 3 * _SEGMENT_BYTES < max(sizes) <= (3 + MAX_EXCESS_SEGMENTS) * _SEGMENT_BYTES
    retired = read_retirements(log)
    assert {each.is_rest_verifiable for each in retired} == {False}
    assert not has_snapshot(segment_paths(log)[0])


def test_on_a_full_disk_retention_waits_for_no_snapshot(tmp_path: Path) -> None:
    """There is no room for one; the limit is kept without the excess, and nothing below the limit goes."""
    maker, log = _SlowMaker(), tmp_path / "log"
    maintenance = Maintenance(4 * _SEGMENT_BYTES, snapshots=maker)
    store = SegmentEventStore.create(log, {}, segment_bytes=_SEGMENT_BYTES, maintenance=maintenance)
    _fill(store, 6)
    maintenance.wait()
    assert segment_paths(log)[0].name == f"{1:020d}.kvlog"
    maintenance.disk_is_full()
    maintenance.wait()
    assert 2 * _SEGMENT_BYTES < sum(path.stat().st_size for path in segment_paths(log)) <= 3 * _SEGMENT_BYTES
    assert {each.is_rest_verifiable for each in read_retirements(log)} == {False}
    store.close()


def test_a_snapshot_that_a_closed_log_lacks_is_made_before_its_beginning_goes(tmp_path: Path) -> None:
    """Closing ends the process that makes snapshots, so a closed log may lack some; the next writer has them made."""
    earlier = SegmentEventStore.create(tmp_path / "a", {}, segment_bytes=_SEGMENT_BYTES)
    _fill(earlier, 5)
    earlier.close()
    maker = _Maker()
    for _ in range(50):
        maker.allowed.release()
    maintenance = Maintenance(5 * _SEGMENT_BYTES, snapshots=maker)
    store = SegmentEventStore.create(tmp_path / "b", {}, segment_bytes=_SEGMENT_BYTES, maintenance=maintenance)
    maker.made.acquire()
    maker.made.acquire()  # else the segments that follow exceed the limit by more than is waited for
    assert [paths[0].parent.name for paths in maker.seen[:2]] == ["b", "a"]
    _fill(store, 2)
    store.close()
    retired = read_retirements(tmp_path / "a")
    assert retired
    assert all(each.is_rest_verifiable for each in retired)
    assert has_snapshot(segment_paths(tmp_path / "a")[0])


def test_a_snapshot_that_cannot_be_made_for_a_closed_log_is_asked_for_once(tmp_path: Path) -> None:
    """As where its code is not here: then its segments go, recorded as not verifiable, and not those of newer logs."""
    earlier = SegmentEventStore.create(tmp_path / "a", {}, segment_bytes=_SEGMENT_BYTES)
    _fill(earlier, 5)
    earlier.close()
    maker = _SlowMaker()
    for _ in range(50):
        maker.allowed.release()
    maintenance = Maintenance(5 * _SEGMENT_BYTES, snapshots=maker)
    store = SegmentEventStore.create(tmp_path / "b", {}, segment_bytes=_SEGMENT_BYTES, maintenance=maintenance)
    making = maintenance._making
    assert making is not None
    making.join()
    assert [paths[0].parent.name for paths in maker.seen] == ["b", "a"]
    assert {each.is_rest_verifiable for each in read_retirements(tmp_path / "a")} == {False}
    store.close()


def test_a_log_dir_that_was_removed_meanwhile_is_no_trouble(tmp_path: Path) -> None:
    """Nothing is left that takes room. A message about it appeared in the output of whatever ran later."""
    troubles: list[OSError | LogError] = []
    maintenance = Maintenance(1, on_trouble=troubles.append)
    maintenance.start(tmp_path / "removed" / "log", _SEGMENT_BYTES)
    maintenance.stop()
    assert troubles == []
