"""Closed segments are compressed while the log is written, and at each moment one whole form is there."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from itertools import pairwise
from pathlib import Path

import pytest
from log_torture.every_change import Moment, kill_at_each_change_in_compressing
from log_torture.failing import FailingDisk
from log_torture.mounts import run_on_small_disk
from log_torture.power import Image, PowerLoss
from log_torture.stored import compress_closed, is_compressed

from kvledger.storage.events import (
    Durability,
    Frame,
    LogDamaged,
    LogReader,
    Maintenance,
    SegmentEventStore,
    retire,
)
from kvledger.storage.events.compressed import MAX_BLOCK_BYTES, compress_segment
from kvledger.storage.events.retention import free_bytes
from kvledger.storage.events.segment_file import segment_paths


def _read(log: Path) -> tuple[list[Frame], LogReader]:
    reader = LogReader(log, settle_seconds=0)
    return list(reader), reader


def test_a_segment_with_damage_or_a_frame_that_is_too_large_stays_raw(raw: Path, tmp_path: Path) -> None:
    """Evidence stays as it is; a block that held such a frame would be refused."""
    shutil.copytree(raw, tmp_path / "damaged")
    segment = segment_paths(tmp_path / "damaged")[0]
    data = bytearray(segment.read_bytes())
    data[400_000] ^= 1
    segment.write_bytes(data)
    store = SegmentEventStore.create(tmp_path / "large", {})
    store.append(b"small", 1)
    store.append(bytes(MAX_BLOCK_BYTES), 1)
    store.close()
    for path in (segment, segment_paths(tmp_path / "large")[0]):
        before = path.read_bytes()
        with pytest.raises(LogDamaged, match="no intact frame that fits into a block"):
            compress_segment(path, replacing=contextlib.nullcontext())
        assert path.read_bytes() == before
        assert not list(path.parent.glob("*.unfinished"))


def test_a_frame_larger_than_a_block_has_one_of_its_own(tmp_path: Path) -> None:
    """Up to the limit of what a block may state."""
    store = SegmentEventStore.create(tmp_path, {})
    for num_bytes in (10, 1_000_000, MAX_BLOCK_BYTES - 39, 10):
        store.append(bytes(num_bytes), 1)
    store.close()
    expected = _read(tmp_path)[0]
    (segment,) = segment_paths(tmp_path)
    compress_segment(segment, replacing=contextlib.nullcontext())
    assert segment.stat().st_size < 100_000
    assert _read(tmp_path)[0] == expected


def test_the_age_of_a_segment_is_that_of_its_frames(raw: Path, tmp_path: Path) -> None:
    """Retention would keep what was compressed late for as much longer."""
    shutil.copytree(raw, tmp_path / "log")
    segment = segment_paths(tmp_path / "log")[0]
    os.utime(segment, ns=(10**18, 10**18))
    compress_segment(segment, replacing=contextlib.nullcontext())
    assert segment.stat().st_mtime_ns == 10**18
    assert segment.stat().st_size < 100_000


def _fill(store: SegmentEventStore, num_segments: int) -> None:
    segments = {store.segment}
    while len(segments) <= num_segments:
        store.append(b"what was written here" * 40, 2)
        segments.add(store.segment)


def _wait_until_compressed(log: Path) -> None:
    while any(not is_compressed(segment) for segment in segment_paths(log)[:-1]):
        threading.Event().wait(0.005)


def test_the_writer_has_closed_segments_compressed_and_leaves_the_one_in_use(tmp_path: Path) -> None:
    """While it writes on; a closed log keeps its last segment raw, and retention counts the bytes of files."""
    log = tmp_path / "log"
    store = SegmentEventStore.create(log, {}, Durability.DISK, 20_000, maintenance=Maintenance())
    _fill(store, 6)
    _wait_until_compressed(log)
    store.close()
    *closed, last = segment_paths(log)
    assert len(closed) == 6
    assert not is_compressed(last)
    assert not list(log.glob("*.unfinished"))
    found, reader = _read(log)
    assert reader.damage == []
    assert found[-1].next_sequence == store.next_sequence
    sizes = [segment.stat().st_size for segment in closed]
    assert max(sizes) < 2_000
    retired = retire(log, max_bytes=last.stat().st_size + sum(sizes[3:]) + 100)  # the lock's, too
    assert [each.num_bytes for each in retired] == sizes[:3]
    assert _read(log)[1].damage == []


def test_a_disk_with_little_room_is_left_to_the_segment_in_use(tmp_path: Path) -> None:
    """The compressed form takes room before it gives any; when there is room again the next segment makes up for it."""
    disk = tmp_path / "disk"

    def look() -> None:
        log = disk / "log"
        store = SegmentEventStore.create(log, {}, segment_bytes=20_000, maintenance=Maintenance())
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(free_bytes(disk) - 55_000))
        _fill(store, 1)
        while any(thread.name == "kvledger-maintenance" for thread in threading.enumerate()):
            threading.Event().wait(0.005)
        assert not any(map(is_compressed, segment_paths(log)))
        ballast.unlink()
        _fill(store, 1)
        _wait_until_compressed(log)
        store.close()
        assert _read(log)[1].damage == []

    run_on_small_disk(disk, 1 << 18, look)


def test_readers_meet_one_whole_form_at_each_moment(tmp_path: Path) -> None:
    """Segments are compressed while others read the log from its beginning: nothing is damaged, nothing is missing."""
    log = tmp_path / "log"
    store = SegmentEventStore.create(log, {}, segment_bytes=20_000, maintenance=Maintenance())
    for _ in range(12):
        _fill(store, 1)
        for _ in range(3):
            found, reader = _read(log)
            assert reader.damage == []
            assert found[-1].next_sequence == store.next_sequence
            assert all(one.next_sequence == other.first_sequence for one, other in pairwise(found))
    store.close()


def test_a_reader_that_is_within_a_segment_reads_it_to_its_end(raw: Path, tmp_path: Path) -> None:
    """It has opened the raw file, which is replaced meanwhile; it goes on in the next segment."""
    log = tmp_path / "log"
    shutil.copytree(raw, log)
    reader, found = LogReader(log), []
    for number, frame in enumerate(reader):
        found.append(frame)
        if number == 3:
            compress_closed(log)
            assert is_compressed(segment_paths(log)[0])
    assert found == _read(raw)[0]
    assert reader.damage == []


def test_closing_gives_up_whatis_compressed(raw: Path, tmp_path: Path) -> None:
    """After any number of blocks the raw segment is there, and nothing else."""
    shutil.copytree(raw, tmp_path / "log")
    segment = segment_paths(tmp_path / "log")[0]
    before = segment.read_bytes()
    for num_blocks in range(4):
        asked: Iterator[bool] = iter([True] * num_blocks)
        compress_segment(segment, replacing=contextlib.nullcontext(), goes_on=lambda asked=asked: next(asked, False))
        assert segment.read_bytes() == before
        assert len(list(segment.parent.iterdir())) == len(list(raw.iterdir()))


def test_a_segment_that_is_retired_meanwhile_is_not_made_again(raw: Path, tmp_path: Path) -> None:
    """Whether it goes before its compressed form is complete, or what is unfinished goes with it."""

    @contextlib.contextmanager
    def retired() -> Iterator[None]:
        assert len(retire(log, max_bytes=1)) == 1
        yield

    log = tmp_path / "log"
    shutil.copytree(raw, log)
    first, last = segment_paths(log)
    with contextlib.suppress(FileNotFoundError):
        compress_segment(first, replacing=retired())
    assert segment_paths(log) == [last]
    assert not list(log.glob("*.unfinished"))


def test_what_a_killed_process_left_unfinished_goes_with_its_segment(raw: Path, tmp_path: Path) -> None:
    """It is counted, and nobody would remove it else."""
    log = tmp_path / "log"
    shutil.copytree(raw, log)
    unfinished = segment_paths(log)[0].with_suffix(".unfinished")
    unfinished.write_bytes(bytes(5_000))
    assert _read(log)[1].damage == []
    retire(log, max_bytes=1)
    assert not unfinished.exists()


@pytest.mark.xdist_group("log_torture")
@pytest.mark.parametrize("moment", ["before", "middle", "after"])
def test_a_process_killed_while_it_compresses_leaves_one_whole_form(
    raw: Path, tmp_path: Path, small_process: Executor, moment: Moment
) -> None:
    """At each change of a file; the next time finishes it."""
    work = small_process.submit(kill_at_each_change_in_compressing, raw, tmp_path / "log", moment)
    assert work.result() > 8


def test_a_disk_that_refuses_leaves_the_raw_segment(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change of a file is refused once. Only the last, the sync of the directory, finds the segment replaced."""
    expected = _read(raw)[0]
    number, num_refused = 0, 1
    while num_refused:
        log = tmp_path / str(number)
        shutil.copytree(raw, log)
        segment, disk = segment_paths(log)[0], FailingDisk(number, 1)
        with monkeypatch.context() as patch:
            disk.install(patch)
            with contextlib.suppress(OSError):
                compress_segment(segment, replacing=contextlib.nullcontext())
        number, num_refused = number + 1, disk.num_refused
        found, reader = _read(log)
        assert found == expected
        assert reader.damage == []
    assert number > 8


def test_a_machine_that_loses_power_while_it_compresses_keeps_the_segment(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name never leads to a file whose bytes are not on disk, although the log has durability `os`."""
    log, found = tmp_path / "log", tmp_path / "found"
    shutil.copytree(raw, log)
    images: list[Image] = []
    power = PowerLoss.of(log, images.append)
    with monkeypatch.context() as patch:
        power.install(patch)
        compress_closed(log)
    assert len(images) > 10
    expected = _read(raw)[0]
    for image in images:
        shutil.rmtree(found, ignore_errors=True)
        image.write_to(found)
        frames, reader = _read(found)
        assert frames == expected, f"moment {image.moment}, lost {image.lost}, {image.num_names_kept} names kept"
        assert reader.damage == []
