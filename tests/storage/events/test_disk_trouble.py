"""Whatever call the disk refuses, and for how long: nobody gets an error, nothing is lost unseen, the log is sound."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from pathlib import Path

import pytest
from log_torture import payload_of
from log_torture.failing import FailingDisk

from kvledger.storage.events import BacklogEventStore, Durability, FrameKind, LogReader, SegmentEventStore
from kvledger.storage.events.group_sync import GroupSync

_NUM_APPENDS = 8


def _make_log(directory: Path, durability: Durability, max_backlog_bytes: int = 1 << 20) -> BacklogEventStore:
    shutil.rmtree(directory, ignore_errors=True)
    segments = SegmentEventStore.create(directory, {}, durability, 300, 60_000)
    seconds = itertools.count()  # one an append, so that attempts come soon
    store = BacklogEventStore(segments, max_backlog_bytes, clock=lambda: float(next(seconds)))
    store.append(payload_of(1), 1)
    return store


def _serve(store: BacklogEventStore, directory: Path) -> None:
    """Append with rollovers; the log is looked at after each append."""
    for _ in range(_NUM_APPENDS):
        sequence = store.next_sequence
        assert store.append(payload_of(sequence), 1) == sequence
        reader = LogReader(directory, settle_seconds=0)
        assert [frame.first_sequence for frame in reader if frame.kind is FrameKind.EVENTS]
        assert {damage.kind for damage in reader.damage} <= {"torn_tail"}


def _stored(directory: Path) -> list[tuple[int, int, FrameKind]]:
    reader = LogReader(directory, settle_seconds=0)
    frames = list(reader)
    assert reader.damage == []
    assert all(frame.payload == payload_of(frame.first_sequence) for frame in frames if frame.kind is FrameKind.EVENTS)
    assert not list(directory.glob("*.unfinished"))
    return [(frame.first_sequence, frame.num_events, frame.kind) for frame in frames]


def _num_calls(directory: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch) -> int:
    store, counting = _make_log(directory, durability), FailingDisk()
    with monkeypatch.context() as patch:
        counting.install(patch)
        _serve(store, directory)
    store.close()
    return counting.num_counted


@pytest.mark.parametrize(
    ("durability", "num_refused"),
    [
        (Durability.OS, 9),
        (Durability.DISK, 1),
        pytest.param(Durability.OS, 1, marks=pytest.mark.long),
        pytest.param(Durability.DISK, 2, marks=pytest.mark.long),
        pytest.param(Durability.DISK, 9, marks=pytest.mark.long),
    ],
)
def test_a_disk_that_refuses_for_a_while_delays_frames_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability, num_refused: int
) -> None:
    """Every change of a file is refused once, also in the middle of a rollover, alone and with those behind it."""
    monkeypatch.setattr(GroupSync, "_run", lambda _self: None)
    directory = tmp_path / "log"
    for number in range(_num_calls(directory, durability, monkeypatch)):
        store, disk = _make_log(directory, durability), FailingDisk(number, num_refused)
        with monkeypatch.context() as patch:
            disk.install(patch)
            _serve(store, directory)
        assert disk.num_refused > 0
        store.flush()
        assert (store.num_events_backlogged, store.num_events_lost) == (0, 0)
        store.close()
        expected = [(sequence, 1, FrameKind.EVENTS) for sequence in range(1, _NUM_APPENDS + 2)]
        assert _stored(directory) == expected, f"call {number}"


def test_a_disk_that_stays_full_costs_the_newest_events_and_the_log_says_how_many_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From every change on everything is refused, longer than the backlog lasts; behind it one gap with the reason."""
    directory = tmp_path / "log"
    num_gaps = 0
    for number in range(_num_calls(directory, Durability.OS, monkeypatch)):
        store, disk = _make_log(directory, Durability.OS, max_backlog_bytes=150), FailingDisk(number, 1 << 30)
        with monkeypatch.context() as patch:
            disk.install(patch)
            _serve(store, directory)
        store.flush()
        store.append(payload_of(store.next_sequence), 1)
        store.close()
        stored = _stored(directory)
        assert [first for first, _, _ in stored[1:]] == [first + count for first, count, _ in stored[:-1]]
        assert stored[-1][0] == _NUM_APPENDS + 2
        in_gaps = sum(count for _, count, kind in stored if kind is FrameKind.GAP)
        assert in_gaps == store.num_events_lost, f"call {number}"
        for frame in LogReader(directory):
            if frame.kind is FrameKind.GAP:
                assert os.strerror(errno.ENOSPC).encode() in frame.payload
                num_gaps += 1
    assert num_gaps > 10
