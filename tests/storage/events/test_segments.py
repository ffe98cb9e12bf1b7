"""The store on disk: segments, refusals, one writer, and what happens when the file system says no."""

from __future__ import annotations

import errno
import itertools
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import google_crc32c
import pytest
from processes import finished

from kvledger.storage.events import (
    Durability,
    LogDamaged,
    LogError,
    LogLocked,
    LogTooNew,
    SegmentEventStore,
    read_log,
    retire,
)
from kvledger.storage.events.frames import next_chain_hash
from kvledger.storage.events.group_sync import GroupSync

Limit = Callable[[int], AbstractContextManager[None]]


def _append_for_ever(store: SegmentEventStore, accepted: list[bytes]) -> None:
    for number in itertools.count():
        payload = b"%03d" % number * 30
        store.append(payload, 1)
        accepted.append(payload)


def _verified_payloads(directory: Path) -> list[bytes]:
    reader = read_log(directory)
    payloads = [frame.payload for frame in reader]
    assert reader.damage == []
    return payloads


def test_a_log_goes_on_in_new_segments_and_verifies_as_one(tmp_path: Path) -> None:
    """A segment is left before it grows over its bound, and the chain goes across."""
    store = SegmentEventStore.create(tmp_path, {"block_size": 16}, segment_bytes=1000)
    payloads = [b"%d" % number * 50 for number in range(40)]
    for payload in payloads:
        store.append(payload, 2)
    head = store.head_hash
    store.close()
    segments = sorted(tmp_path.glob("*.kvlog"))
    assert len(segments) > 5
    assert all(segment.stat().st_size <= 1000 for segment in segments)
    reader = read_log(tmp_path)
    assert [frame.payload for frame in reader] == payloads
    assert (reader.damage, reader.head_hash, reader.next_sequence) == ([], head, 81)


def test_a_frame_larger_than_a_segment_gets_its_own(tmp_path: Path) -> None:
    """The bound closes segments; it refuses no frame."""
    store = SegmentEventStore.create(tmp_path, {}, segment_bytes=440)
    for payload in (b"small", b"x" * 5000, b"small"):
        store.append(payload, 1)
    store.close()
    assert _verified_payloads(tmp_path) == [b"small", b"x" * 5000, b"small"]
    assert len(list(tmp_path.glob("*.kvlog"))) == 3


def test_a_large_first_frame_follows_from_the_noted_head(tmp_path: Path) -> None:
    """A segment without frames is not left for a new one: the head of an empty log stays a valid anchor."""
    store = SegmentEventStore.create(tmp_path, {}, segment_bytes=1)
    anchor = store.head_hash
    store.append(b"x" * 5000, 1)
    (frame,) = store.read()
    assert frame.chain_hash == next_chain_hash(anchor, frame)
    store.close()


def test_a_corrupt_frame_in_the_middle_is_refused_by_its_place(tmp_path: Path) -> None:
    """The message says where it is, and reading a damaged log as it is still shows the rest."""
    store = SegmentEventStore.create(tmp_path, {})
    for payload in (b"one", b"two", b"three"):
        store.append(payload, 1)
    store.close()
    segment = next(tmp_path.glob("*.kvlog"))
    segment.write_bytes(segment.read_bytes().replace(b"two", b"TWO"))
    with pytest.raises(LogDamaged, match=r"corrupt_frame at offset \d+: .*sequence 2 are lost"):
        list(store.read())
    assert [frame.payload for frame in read_log(tmp_path)] == [b"one", b"three"]


def test_a_later_format_says_which_version_it_needs(tmp_path: Path) -> None:
    """An intact header of format 7, or one copy, is `LogTooNew`."""
    SegmentEventStore.create(tmp_path, {}).close()
    segment = next(tmp_path.glob("*.kvlog"))
    data = segment.read_bytes()
    body = data[18 : len(data) // 2]
    prefix = data[:8] + struct.pack("<H", 7) + data[10:14]
    later = prefix + struct.pack("<I", google_crc32c.value(prefix + body)) + body
    for block in (2 * later, later, bytes(len(later)) + later):
        segment.write_bytes(block)
        with pytest.raises(LogTooNew, match="knows format 7"):
            read_log(tmp_path)


def test_a_log_whose_oldest_segments_were_retired_verifies(tmp_path: Path) -> None:
    """Whole segments gone from the front leave a log that goes on from their hash; reading says what is gone."""
    store = SegmentEventStore.create(tmp_path, {}, segment_bytes=1)
    for payload in (b"one", b"two", b"three"):
        store.append(payload, 1)
    store.close()
    num_bytes = sum(path.stat().st_size for path in tmp_path.glob("*.kvlog"))
    assert len(retire(tmp_path, max_bytes=num_bytes - 1)) == 1
    reader = read_log(tmp_path)
    assert [frame.first_sequence for frame in reader] == [2, 3]
    assert reader.damage == []
    assert [(retired.first_sequence, retired.last_sequence) for retired in reader.retired] == [(1, 1)]


def test_a_log_is_not_created_over_another_one(tmp_path: Path) -> None:
    """It is refused; a refusal leaves no lock behind."""
    SegmentEventStore.create(tmp_path, {}).close()
    with pytest.raises(LogError, match="holds a log already"):
        SegmentEventStore.create(tmp_path, {})
    assert retire(tmp_path, max_bytes=0) == []


@pytest.mark.parametrize("header", [{"log_id": "mine"}, {"key": object()}, {"key": 1 << 70}, {"key": "x" * (2 << 20)}])
def test_a_header_that_cannot_be_stored_is_refused(tmp_path: Path, header: dict[str, object]) -> None:
    """The caller learns of it before anything is on disk."""
    with pytest.raises(LogError, match="header mapping"):
        SegmentEventStore.create(tmp_path, header)
    assert list(tmp_path.iterdir()) == []


def test_a_second_writer_is_refused_and_told_the_pid(tmp_path: Path) -> None:
    """In this process and in another one; the lock goes with its holder."""
    store = SegmentEventStore.create(tmp_path, {})
    with pytest.raises(LogLocked, match=f"pid {os.getpid()};"):
        SegmentEventStore.create(tmp_path, {})
    code = "import sys; from kvledger.storage.events import *; SegmentEventStore.create(sys.argv[1], {})"
    child = finished([sys.executable, "-c", code, tmp_path])
    assert f"LogLocked: {tmp_path}: the log is being written by pid {os.getpid()};" in child.stderr
    store.close()
    assert retire(tmp_path, max_bytes=0) == []


def test_a_write_that_stops_half_way_is_rolled_back(tmp_path: Path, file_size_limit: Limit) -> None:
    """The file system takes part of a frame: the caller gets the OSError, the log is as before, and goes on later."""
    store = SegmentEventStore.create(tmp_path, {})
    segment = next(tmp_path.glob("*.kvlog"))
    accepted: list[bytes] = []
    with file_size_limit(2000):
        with pytest.raises(OSError, match="File too large") as refusal:
            _append_for_ever(store, accepted)
        assert refusal.value.errno == errno.EFBIG
        size = segment.stat().st_size
        assert size + 129 > 2000 > size
        state = (store.next_sequence, store.head_hash)
        with pytest.raises(OSError, match="File too large"):
            store.append(b"y" * 90, 1)
        assert (store.next_sequence, store.head_hash) == state
        assert [frame.payload for frame in store.read()] == accepted
    store.append(b"later", 1)
    store.close()
    assert _verified_payloads(tmp_path) == [*accepted, b"later"]


def test_a_rollover_that_fails_half_way_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new segment is there and cannot be opened: the old one stays in use, also for a frame that still fits."""
    store = SegmentEventStore.create(tmp_path, {}, segment_bytes=440)
    store.append(b"x" * 80, 1)
    really_open = os.open

    def refuse_segments(path: os.PathLike[str], flags: int, mode: int = 0o777) -> int:
        if str(path).endswith(".kvlog"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return really_open(path, flags, mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse_segments)
        with pytest.raises(OSError, match="Too many open files"):
            store.append(b"y" * 120, 1)
    assert len(list(tmp_path.glob("*.kvlog"))) == 2
    assert store.append(b"fits", 1) == 2
    assert store.append(b"y" * 120, 1) == 3
    store.close()
    assert _verified_payloads(tmp_path) == [b"x" * 80, b"fits", b"y" * 120]


def test_an_interrupt_between_write_and_commit_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C right after the bytes reached the file: the append did not happen, and the next one takes its place."""
    store = SegmentEventStore.create(tmp_path, {})
    store.append(b"before", 1)
    write = os.write

    def write_and_interrupt(descriptor: int, data: bytes) -> int:
        write(descriptor, data)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.append(b"interrupted", 1)
    assert store.append(b"after", 1) == 2
    store.close()
    assert _verified_payloads(tmp_path) == [b"before", b"after"]


def test_a_read_only_directory_refuses_new_segments_and_loses_nothing(
    tmp_path: Path, read_only_directory: Callable[[], AbstractContextManager[None]]
) -> None:
    """The segment in use stays in use."""
    store = SegmentEventStore.create(Path(), {}, segment_bytes=480)
    store.append(b"x" * 100, 1)
    with read_only_directory():
        with pytest.raises(PermissionError):
            store.append(b"y" * 100, 1)
        assert store.append(b"fits", 1) == 2
    store.append(b"y" * 100, 1)
    store.close()
    assert _verified_payloads(tmp_path) == [b"x" * 100, b"fits", b"y" * 100]
    assert list(tmp_path.glob("*.unfinished")) == []


def test_disk_durability_ends_its_thread(tmp_path: Path) -> None:
    """Closing syncs and leaves no thread behind, however many segments there were."""
    before = threading.active_count()
    store = SegmentEventStore.create(tmp_path, {}, Durability.DISK, segment_bytes=640, sync_interval_ms=1)
    for number in range(20):
        store.append(b"%d" % number * 50, 1)
    store.flush()
    assert threading.active_count() == before + 1
    store.close()
    assert threading.active_count() == before
    assert len(_verified_payloads(tmp_path)) == 20


def _check_repeatedly(sync: GroupSync) -> None:
    while True:  # the thread needs a millisecond
        sync.check()
        time.sleep(0.01)


def test_a_sync_that_failed_in_the_thread_is_raised_once() -> None:
    """A descriptor that cannot be synced: the next check raises the kernel's own error."""
    reading, writing = os.pipe()
    sync = GroupSync(writing, 1)
    try:
        sync.note_written()
        with pytest.raises(OSError, match="Invalid argument"):
            _check_repeatedly(sync)
        sync.check()
    finally:
        sync.stop()
        os.close(reading)
        os.close(writing)
