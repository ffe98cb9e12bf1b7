"""I/O trouble never reaches the caller of a backlog, and the log tells the truth about it afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kvledger.storage.events import AppendConflict, BacklogEventStore, FrameKind, SegmentEventStore, read_log
from kvledger.storage.events.frames import FRAME_HEADER_BYTES

Limit = Callable[[int], AbstractContextManager[None]]


class _Troubles:
    """Remembers what `on_trouble` was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[OSError, int]] = []

    def __call__(self, error: OSError, num_events: int) -> None:
        self.calls.append((error, num_events))


def _stored(directory: Path) -> list[tuple[int, int, FrameKind, bytes]]:
    reader = read_log(directory)
    frames = [(frame.first_sequence, frame.num_events, frame.kind, frame.payload) for frame in reader]
    assert reader.damage == []
    return frames


def test_a_full_disk_delays_frames_and_loses_none(tmp_path: Path, file_size_limit: Limit) -> None:
    """Sequence numbers handed out while nothing can be written are the ones written when it works again."""
    troubles = _Troubles()
    store = BacklogEventStore(SegmentEventStore.create(tmp_path, {}), on_trouble=troubles)
    payloads = [b"%03d" % number * 30 for number in range(60)]
    with file_size_limit(2000):
        sequences = [store.append(payload, 2) for payload in payloads[:50]]
        assert store.num_events_backlogged > 0
        store.flush()
    sequences += [store.append(payload, 2) for payload in payloads[50:]]
    store.flush()
    assert sequences == list(range(1, 121, 2))
    assert (store.num_events_backlogged, store.num_events_lost, store.next_sequence) == (0, 0, 121)
    assert troubles.calls
    assert all(isinstance(error, OSError) and num_events > 0 for error, num_events in troubles.calls)
    store.close()
    assert _stored(tmp_path) == [
        (sequence, 2, FrameKind.EVENTS, payload) for sequence, payload in zip(sequences, payloads, strict=True)
    ]


def test_past_the_bound_the_newest_are_dropped_and_become_a_gap(tmp_path: Path, file_size_limit: Limit) -> None:
    """The log says how many events are missing, where and why; what came before and after is whole."""
    store = BacklogEventStore(SegmentEventStore.create(tmp_path, {}), max_backlog_bytes=300)
    store.append(b"before", 1)
    with file_size_limit(1):
        for number in range(10):
            assert store.append(b"%d" % number * 61, 3) == 2 + 3 * number
        assert (store.num_events_backlogged, store.num_events_lost) == (9, 21)
    store.flush()
    assert store.append(b"after", 1) == 32
    store.close()
    frames = _stored(tmp_path)
    assert store.num_bytes_written == sum(FRAME_HEADER_BYTES + len(payload) for *_, payload in frames)
    assert [frame[:3] for frame in frames] == [
        (1, 1, FrameKind.EVENTS),
        (2, 3, FrameKind.EVENTS),
        (5, 3, FrameKind.EVENTS),
        (8, 3, FrameKind.EVENTS),
        (11, 21, FrameKind.GAP),
        (32, 1, FrameKind.EVENTS),
    ]
    assert frames[4][3] == b"the memory for waiting events was full while writing failed: [Errno 27] File too large"
    assert store.num_events_lost == 21


def test_two_outages_leave_two_gaps(tmp_path: Path, file_size_limit: Limit) -> None:
    """Once the backlog is written out the bound counts anew."""
    store = BacklogEventStore(SegmentEventStore.create(tmp_path, {}), max_backlog_bytes=0)
    for _ in range(2):
        with file_size_limit(1):
            store.append(b"lost", 5)
            store.append_gap(1, "lost, too")
        store.flush()
        store.append(b"kept", 1)
    store.close()
    assert [frame[:3] for frame in _stored(tmp_path)] == [
        (1, 6, FrameKind.GAP),
        (7, 1, FrameKind.EVENTS),
        (8, 6, FrameKind.GAP),
        (14, 1, FrameKind.EVENTS),
    ]
    assert store.num_events_lost == 12


def test_a_gap_waits_in_its_place(tmp_path: Path, file_size_limit: Limit) -> None:
    """A gap appended during an outage keeps its order and its reason."""
    store = BacklogEventStore(SegmentEventStore.create(tmp_path, {}))
    with file_size_limit(1):
        sequences = [store.append_gap(2, "why"), store.append(b"a", 1), store.append_gap(3, "why not")]
    store.close()
    assert sequences == [1, 3, 4]
    assert [frame[3] for frame in _stored(tmp_path)] == [b"why", b"a", b"why not"]


def test_a_directory_that_became_read_only_is_survived(
    tmp_path: Path, read_only_directory: Callable[[], AbstractContextManager[None]]
) -> None:
    """No new segment can be made: frames wait, and are written when the rights are back."""
    store = BacklogEventStore(SegmentEventStore.create(Path(), {}, segment_bytes=440))
    with read_only_directory():
        for number in range(10):
            store.append(b"%d" % number * 100, 1)
        assert store.num_events_backlogged > 0
    store.close()
    assert [frame[0] for frame in _stored(tmp_path)] == list(range(1, 11))
    assert (store.num_events_backlogged, store.num_events_lost) == (0, 0)


def test_what_cannot_be_written_at_closing_is_counted_as_lost(tmp_path: Path, file_size_limit: Limit) -> None:
    """Closing during an outage raises nothing, and the count and the callback say what was lost."""
    troubles = _Troubles()
    store = BacklogEventStore(SegmentEventStore.create(tmp_path, {}), on_trouble=troubles)
    with file_size_limit(1):
        store.append(b"lost", 7)
        store.close()
    assert (store.num_events_backlogged, store.num_events_lost) == (0, 7)
    assert [num_events for _, num_events in troubles.calls] == [7, 7]
    assert _stored(tmp_path) == []


def test_an_append_elsewhere_is_a_conflict_also_while_something_waits(tmp_path: Path, file_size_limit: Limit) -> None:
    """Where the log ends does not depend on whether its last frame is on disk yet."""
    store = BacklogEventStore(SegmentEventStore.create(tmp_path, {}))
    store.append(b"written", 1)
    with file_size_limit(1):
        store.append(b"waiting", 2)
        for place in (1, 2, 5):
            with pytest.raises(AppendConflict, match="the log's next one is 4"):
                store.append(b"other", 1, expected_sequence=place)
        with pytest.raises(ValueError, match="a frame holds 1 to"):
            store.append(b"", 0)
    store.close()
    assert [frame[3] for frame in _stored(tmp_path)] == [b"written", b"waiting"]


def test_what_waits_is_tried_again_when_time_has_passed(tmp_path: Path, file_size_limit: Limit) -> None:
    """Attempts get rarer: after 0.1 s, 0.2 s, … and then every 5 s at the next append."""
    troubles, now = _Troubles(), [0.0]
    store = BacklogEventStore(SegmentEventStore.create(tmp_path, {}), on_trouble=troubles, clock=lambda: now[0])
    with file_size_limit(1):
        for number in range(100):
            now[0] = number / 10
            for _ in range(6):
                store.append(b"", 1)
        before = len(troubles.calls)
        assert before == 7  # pauses of 0.1, 0.2, 0.4, 0.8, 1.6 and 3.2 s between them
        store.append(b"", 1)
        assert len(troubles.calls) == before
        for number in range(1, 4):
            now[0] += 5.0
            store.append(b"", 1)
            assert len(troubles.calls) == before + number
    now[0] += 5.0
    store.append(b"", 1)
    assert store.num_events_backlogged == 0
    assert len(_stored(tmp_path)) == 605
    store.close()


def test_what_waits_is_written_also_where_nothing_is_appended_any_more(tmp_path: Path, file_size_limit: Limit) -> None:
    """An idle engine appends nothing: a thread tries again and says so; it ends with the store."""
    written_again: list[tuple[int, int]] = []
    is_written = threading.Event()

    def note(num_events: int, num_lost: int) -> None:
        written_again.append((num_events, num_lost))
        is_written.set()

    before = set(threading.enumerate())
    segments = SegmentEventStore.create(tmp_path, {})
    store = BacklogEventStore(segments, on_written_again=note, writes_alone=True)
    with file_size_limit(1):
        store.append(b"waits", 3)
        assert store.num_events_backlogged == 3
    assert is_written.wait(60)
    assert (written_again, store.num_events_backlogged) == ([(3, 0)], 0)
    assert store.append(b"after", 1) == 4
    store.close()
    assert not set(threading.enumerate()) - before
    assert [frame[:2] for frame in _stored(tmp_path)] == [(1, 3), (4, 1)]


class _SlowFiles(SegmentEventStore):
    """On a disk that takes writes, and new files when it is allowed to."""

    allowed: threading.Event
    begun: threading.Event

    def _start_segment(self) -> None:
        self.begun.set()
        self.allowed.wait()
        super()._start_segment()


def _slow_files(directory: Path) -> _SlowFiles:
    segments: Any = _SlowFiles.create(directory, {}, segment_bytes=700)
    segments.allowed, segments.begun = threading.Event(), threading.Event()
    return segments


def test_an_append_waits_no_longer_than_it_was_allowed_to_and_the_next_ones_not_at_all(tmp_path: Path) -> None:
    """A disk that stalls for good keeps nobody: what it does not take waits, in order, and is said to wait."""
    troubles, written_again = _Troubles(), threading.Event()
    segments = _slow_files(tmp_path)
    store = BacklogEventStore(
        segments, on_trouble=troubles, on_written_again=lambda *_: written_again.set(), writes_alone=True, max_wait_ms=1
    )
    sequences = [store.append(b"%03d" % number * 20, 2) for number in range(40)]
    assert segments.begun.wait(60)
    assert store.is_behind
    assert store.num_events_backlogged == 80 - segments.next_sequence + 1
    ((error, num_events),) = troubles.calls
    assert isinstance(error, TimeoutError)
    assert num_events == 2
    segments.allowed.set()
    store.flush()
    assert not store.is_behind
    assert written_again.is_set()
    store.close()
    assert [frame[0] for frame in _stored(tmp_path)] == sequences == list(range(1, 81, 2))
    assert len(list(tmp_path.glob("*.kvlog"))) > 3


def test_without_a_limit_an_append_waits_as_long_as_it_takes(tmp_path: Path) -> None:
    """New files are begun by the thread; whoever appended finds everything written when that returns."""
    segments = _slow_files(tmp_path)
    store = BacklogEventStore(segments, writes_alone=True)
    release = threading.Timer(0, lambda: segments.begun.wait() and segments.allowed.set())
    release.start()
    for number in range(40):
        store.append(b"%03d" % number * 20, 2)
        assert not store.is_behind
        assert segments.next_sequence == store.next_sequence
    release.join()
    store.close()
    assert len(_stored(tmp_path)) == 40


def test_what_waits_longer_than_memory_allows_is_counted_while_the_disk_stands_still(tmp_path: Path) -> None:
    """Dropped frames are one gap, also where the thread is about to write it."""
    segments = _slow_files(tmp_path)
    store = BacklogEventStore(segments, max_backlog_bytes=400, writes_alone=True, max_wait_ms=1)
    for number in range(40):
        store.append(b"%03d" % number * 20, 2)
    num_lost = store.num_events_lost
    assert num_lost > 0
    segments.allowed.set()
    store.flush()
    store.append(b"after", 1)
    store.close()
    frames = _stored(tmp_path)
    assert sum(num_events for _, num_events, kind, _ in frames if kind is FrameKind.GAP) == num_lost
    assert sum(frame[1] for frame in frames) == 81


def test_a_log_that_is_closed_while_the_disk_stands_still_is_whole_when_that_is_over(tmp_path: Path) -> None:
    """Closing waits: nothing that was taken is given up."""
    segments = _slow_files(tmp_path)
    store = BacklogEventStore(segments, writes_alone=True, max_wait_ms=1)
    for number in range(40):
        store.append(b"%03d" % number * 20, 2)
    release = threading.Timer(0.05, segments.allowed.set)
    release.start()
    store.close()
    release.join()
    assert store.num_events_lost == 0
    assert len(_stored(tmp_path)) == 40


def test_a_mistake_in_the_thread_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported like a disk that refuses, and tried again."""
    troubles = _Troubles()
    segments = SegmentEventStore.create(tmp_path, {}, segment_bytes=700)
    store = BacklogEventStore(segments, on_trouble=troubles, writes_alone=True)
    with monkeypatch.context() as patch:
        patch.setattr(segments, "_start_segment", lambda: 1 / 0)
        for number in range(40):
            store.append(b"%03d" % number * 20, 2)
        assert store.is_behind
    assert "ZeroDivisionError" in str(troubles.calls[0][0])
    store.flush()
    store.close()
    assert len(_stored(tmp_path)) == 40
