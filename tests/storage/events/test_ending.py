"""How a log ended is a fact that lies beside it, and so is what is missing at its end."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from log_torture import reopened
from log_torture.mounts import fill, run_on_small_disk
from processes import run_and_kill

from kvledger.storage.events import (
    BacklogEventStore,
    HowEnded,
    LogEnding,
    LogReader,
    SegmentEventStore,
    is_being_written,
    judge_ending,
)
from kvledger.storage.events.end_record import read_end_record

Limit = Callable[[int], AbstractContextManager[None]]


def _ending(directory: Path) -> LogEnding:
    """What a reader finds."""
    was_open = is_being_written(directory)
    reader = LogReader(directory, settle_seconds=0)
    for _ in reader:
        pass
    assert reader.damage == []
    return judge_ending(directory, reader.header["log_id"], reader.next_sequence, reader.head_hash, was_open=was_open)


def _missing(directory: Path) -> tuple[str, str, int, int]:
    """Kind, segment, first sequence and number of the events that are missing at the end."""
    missing = _ending(directory).missing
    assert missing is not None
    return missing.kind, missing.segment, missing.first_sequence, missing.num_events


def _write(directory: Path, num_frames: int, segment_bytes: int = 200) -> SegmentEventStore:
    """Two events a frame, two frames a segment."""
    store = SegmentEventStore.create(directory, {}, segment_bytes=segment_bytes + _header_bytes())
    for number in range(num_frames):
        store.append(b"%d" % number * 30, 2)
    return store


def _header_bytes() -> int:
    return 140


def _newest(directory: Path) -> Path:
    return max(directory.glob("*.kvlog"))


def test_a_log_is_open_while_it_is_written_and_closed_afterwards(tmp_path: Path) -> None:
    """The writer's lock tells the one, its record the other."""
    store = _write(tmp_path, 5)
    assert _ending(tmp_path) == LogEnding(HowEnded.OPEN)
    store.close()
    assert _ending(tmp_path) == LogEnding(HowEnded.CLOSED)


def test_a_log_whose_process_was_killed_is_cut_off_and_lacks_nothing(tmp_path: Path) -> None:
    """Every frame is on disk when its append returns: nothing is missing, but the log was not closed."""
    run_and_kill(lambda: _write(tmp_path, 5) and None)
    assert _ending(tmp_path) == LogEnding(HowEnded.CUT_OFF)


def test_whether_a_log_is_written_is_asked_without_disturbing_its_next_writer(tmp_path: Path) -> None:
    """Who asks holds a shared lock for a moment; a writer that comes then asks again."""
    for number in range(200):
        directory = tmp_path / str(number)
        directory.mkdir()
        assert not is_being_written(directory)
        _write(directory, 1).close()
    assert not is_being_written(tmp_path / "nothing")


def test_without_its_record_nobody_knows_how_a_log_ended(tmp_path: Path) -> None:
    """A copy of the segments alone, a mirror, a record of another log, a damaged one."""
    _write(tmp_path / "log", 3).close()
    record = tmp_path / "log" / "log.end"
    whole = record.read_bytes()
    _write(tmp_path / "other", 3).close()
    for data in (
        None,
        (tmp_path / "other" / "log.end").read_bytes(),
        whole.replace(b"true", b"null"),
        whole[:100],
        b"",
    ):
        record.unlink(missing_ok=True)
        if data is not None:
            record.write_bytes(data)
        ending = _ending(tmp_path / "log")
        assert (ending.how, ending.missing) == (HowEnded.UNKNOWN, None)
        assert "no record" in ending.detail


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_newest_segment_that_is_gone_is_missed(tmp_path: Path, *, is_closed: bool) -> None:
    """The record names it; of a log that was killed it knows where it began, of a closed one also where it ended."""
    if is_closed:
        _write(tmp_path, 5).close()
    else:
        run_and_kill(lambda: _write(tmp_path, 5) and None)
    newest = _newest(tmp_path)
    first = int(newest.stem)
    newest.unlink()
    assert _missing(tmp_path) == ("missing_segment", newest.name, first, 11 - first if is_closed else 0)
    assert _ending(tmp_path).how is (HowEnded.CLOSED if is_closed else HowEnded.CUT_OFF)


def test_a_snapshot_alone_speaks_of_a_newest_segment_that_is_gone(tmp_path: Path) -> None:
    """Without the record how many events are gone is not known."""
    _write(tmp_path, 5).close()
    newest = _newest(tmp_path)
    newest.with_suffix(".snapshot").touch()
    newest.unlink()
    (tmp_path / "log.end").unlink()
    assert _missing(tmp_path) == ("missing_segment", newest.name, int(newest.stem), 0)


def test_frames_that_are_cut_off_behind_the_last_one_are_missed(tmp_path: Path) -> None:
    """A segment that ends exactly behind a frame looks like one that was closed there; the record knows better."""
    _write(tmp_path, 3, segment_bytes=1 << 20).close()
    newest = _newest(tmp_path)
    newest.write_bytes(newest.read_bytes()[: -39 - 30])
    assert _missing(tmp_path) == ("cut_segment", newest.name, 5, 2)


@pytest.mark.parametrize("num_frames_left", [1, 0])
def test_frames_cut_off_a_log_that_was_not_closed_look_as_if_it_had_been_killed_before_them(
    tmp_path: Path, num_frames_left: int
) -> None:
    """The record knows of such a log only where its newest segment began: it does not follow each frame."""
    run_and_kill(lambda: _write(tmp_path, 2, segment_bytes=1 << 20) and None)
    newest = _newest(tmp_path)
    newest.write_bytes(newest.read_bytes()[: -(2 - num_frames_left) * (39 + 30)])
    assert _ending(tmp_path) == LogEnding(HowEnded.CUT_OFF)


def test_an_end_that_somebody_else_wrote_contradicts_the_record(tmp_path: Path) -> None:
    """As many events, with a chain that fits, and another hash."""
    store = _write(tmp_path, 2, segment_bytes=1 << 20)
    short = _newest(tmp_path).read_bytes()
    store.append(b"the truth", 1)
    store.close()
    record = (tmp_path / "log.end").read_bytes()
    _newest(tmp_path).write_bytes(short)
    (tmp_path / "log.end").unlink()
    store = reopened(tmp_path)
    store.append(b"something else", 1)
    store.close()
    (tmp_path / "log.end").write_bytes(record)
    assert "has another chain hash" in _ending(tmp_path).contradiction


def test_events_that_wait_for_a_disk_are_known_after_the_writer_was_killed(
    tmp_path: Path, file_size_limit: Limit
) -> None:
    """The record lies where it can be overwritten when nothing can be appended. While the writer lives, it waits."""

    def fill_up() -> None:
        with file_size_limit(2000):
            seconds = itertools.count()
            segments = SegmentEventStore.create(tmp_path, {})
            store = BacklogEventStore(segments, clock=lambda: float(next(seconds)))
            for _ in range(100):
                store.append(bytes(100), 7)
            ending = _ending(tmp_path)
            assert (ending.how, ending.missing) == (HowEnded.OPEN, None)
            assert "could not be written: [Errno 27] File too large; the writer tries again" in ending.detail
            os.kill(os.getpid(), signal.SIGKILL)

    run_and_kill(fill_up)
    kind, _, first, num_events = _missing(tmp_path)
    assert kind == "unwritten_events"
    assert first + num_events - 1 > 64 * 7
    assert _ending(tmp_path).how is HowEnded.CUT_OFF


def test_events_that_could_not_be_written_at_closing_are_counted(tmp_path: Path, file_size_limit: Limit) -> None:
    """Closing tries once more; what stays unwritten is known to the last event."""
    store = BacklogEventStore(SegmentEventStore.create(tmp_path, {}))
    with file_size_limit(2000):
        for _ in range(100):
            store.append(bytes(100), 7)
        store.close()
    kind, segment, first, num_events = _missing(tmp_path)
    assert (kind, segment, first + num_events) == ("unwritten_events", _newest(tmp_path).name, 701)
    ending = _ending(tmp_path)
    assert ending.how is HowEnded.CLOSED
    assert ending.missing is not None
    assert ending.missing.detail == f"sequences {first} to 700 could not be written: [Errno 27] File too large"


def test_events_that_were_written_later_are_not_missed(tmp_path: Path, file_size_limit: Limit) -> None:
    """Also where the process was killed before it could say so: what is there, is there."""
    store = BacklogEventStore(SegmentEventStore.create(tmp_path, {}))
    with file_size_limit(2000):
        for _ in range(100):
            store.append(bytes(100), 7)
    waited = (tmp_path / "log.end").read_bytes()
    store.flush()
    recorded = read_end_record(tmp_path)
    assert recorded is not None
    assert (recorded.end_sequence, recorded.num_unwritten, recorded.reason) == (701, 0, "")
    store.close()
    assert _ending(tmp_path) == LogEnding(HowEnded.CLOSED)
    (tmp_path / "log.end").write_bytes(waited)
    assert _ending(tmp_path) == LogEnding(HowEnded.CUT_OFF)


def test_a_disk_that_is_really_full_takes_the_record_of_what_it_did_not_take(tmp_path: Path) -> None:
    """To the last byte: a writer that is killed then leaves the number of the events behind the last one written."""
    disk = tmp_path / "disk"

    def work() -> None:
        def serve() -> None:
            store = BacklogEventStore(SegmentEventStore.create(disk / "log", {}, segment_bytes=4096))
            for number in range(100):
                store.append(bytes(200), 3)
                if number == 30:
                    fill(disk)
            store.flush()  # one more attempt, so that all are counted
            os.kill(os.getpid(), signal.SIGKILL)

        run_and_kill(serve)
        kind, _, first, num_events = _missing(disk / "log")
        assert (kind, first + num_events) == ("unwritten_events", 301)
        ending = _ending(disk / "log")
        assert ending.missing is not None
        assert ending.missing.detail.endswith("could not be written: [Errno 28] No space left on device")
        assert num_events > 150

    run_on_small_disk(disk, 128 << 10, work)


def test_a_forked_child_that_outlives_its_writer_does_not_keep_the_log_open(tmp_path: Path) -> None:
    """As of an engine's process that is killed while a helper process it had forked goes on."""
    read, write = os.pipe()

    def fork_and_wait() -> None:
        store = _write(tmp_path / "log", 3)
        if os.fork() == 0:
            os.read(read, 1)
            os._exit(0)
        assert store.next_sequence == 7

    run_and_kill(fork_and_wait, signal.SIGKILL)
    try:
        assert _ending(tmp_path / "log").how is HowEnded.CUT_OFF
    finally:
        os.write(write, b".")
        os.close(read)
        os.close(write)
