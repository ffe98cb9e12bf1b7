"""Old segments go by size and by age, whole ones, recorded first; what was taken out without a record is damage."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from concurrent.futures import Executor
from pathlib import Path

import pytest
from log_torture.every_change import Moment, kill_at_each_change_in_retiring, kill_at_each_change_on_full_disk
from log_torture.mounts import fill, run_on_small_disk
from log_torture.power import Image, PowerLoss

from kvledger.storage.events import (
    LogDamaged,
    LogLocked,
    LogReader,
    Maintenance,
    SegmentEventStore,
    maintenance,
    make_room,
    read_log,
    retire,
    retire_logs,
)
from kvledger.storage.events.files import RefusedFile
from kvledger.storage.events.retirements import RETIREMENTS_NAME, read_retirements

_SEGMENT_BYTES = 1000
_BUDGET = 4000
_HOUR = 3600.0


def _write(directory: Path, num_appends: int = 60, maintenance: Maintenance | None = None) -> SegmentEventStore:
    store = SegmentEventStore.create(directory, {}, segment_bytes=_SEGMENT_BYTES, maintenance=maintenance)
    for number in range(num_appends):
        store.append(b"%03d" % number * 30, 2)
    return store


def _closed(directory: Path, num_appends: int = 60) -> Path:
    _write(directory, num_appends).close()
    return directory


def _size(directory: Path) -> int:
    num_bytes = 0
    for path in directory.glob("*.kvlog"):
        with contextlib.suppress(FileNotFoundError):  # retired since it was listed
            num_bytes += path.stat().st_size
    return num_bytes


def _segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.kvlog"))


def _age(segment: Path, hours: float) -> None:
    then = time.time() - hours * _HOUR
    os.utime(segment, (then, then))


@pytest.mark.parametrize("is_compressed", [False, True], ids=["as written", "compressed"])
def test_a_log_is_kept_to_a_size_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_compressed: bool
) -> None:
    """However long it is written: its segments never take more than the budget and one, and the log verifies.

    While a segment is compressed, both of its forms take room, and one segment more may have to go.
    """
    if not is_compressed:
        monkeypatch.setattr(maintenance, "free_bytes", lambda _directory: 0)  # the room left belongs to the last one
    log = tmp_path / "log"
    store = SegmentEventStore.create(log, {}, segment_bytes=_SEGMENT_BYTES, maintenance=Maintenance(_BUDGET))
    sizes = []
    for number in range(600):
        store.append(b"%03d" % number * 30, 2)
        sizes.append(_size(log))
    store.close()
    assert _BUDGET - 2 * _SEGMENT_BYTES < max(sizes) <= _BUDGET + _SEGMENT_BYTES
    assert _size(log) > _BUDGET - (2 + is_compressed) * _SEGMENT_BYTES, "no more is retired than has to be"
    reader = read_log(log)
    frames = list(reader)
    assert reader.damage == []
    assert frames[-1].next_sequence == 1201
    assert reader.retired[0].first_sequence == 1
    assert reader.retired[-1].last_sequence + 1 == frames[0].first_sequence > 1000
    assert {retirement.reason for retirement in reader.retired} == {"size"}


def test_segments_that_are_too_old_go_and_others_stay(tmp_path: Path) -> None:
    """The age of a segment counts from its last write; the last one stays, however old."""
    log = _closed(tmp_path / "log")
    segments = _segments(log)
    for number, segment in enumerate(segments):
        _age(segment, hours=10 - number)
    gone = retire(log, max_age_seconds=7.5 * _HOUR)
    assert [(each.segment, each.reason) for each in gone] == [(each.name, "age") for each in segments[:3]]
    assert _segments(log) == segments[3:]
    assert len(retire(log, max_age_seconds=0)) == len(segments) - 4
    assert _segments(log) == segments[-1:]


def test_a_dry_run_tells_and_deletes_nothing(tmp_path: Path) -> None:
    """What it names is what goes afterwards; not even the lock is taken."""
    log = _closed(tmp_path / "log")
    before = {path.name: path.read_bytes() for path in log.iterdir()}
    told = retire(log, max_bytes=_BUDGET, dry_run=True)
    assert {path.name: path.read_bytes() for path in log.iterdir()} == before
    assert [each.segment for each in told] == [each.segment for each in retire(log, max_bytes=_BUDGET)]
    assert retire(log, max_bytes=_BUDGET, dry_run=True) == []


def test_a_log_that_is_being_written_is_left_to_its_writer(tmp_path: Path) -> None:
    """Two may not delete at once, and the writer's own limits hold."""
    store = _write(tmp_path / "log")
    with pytest.raises(LogLocked, match="being written by pid"):
        retire(tmp_path / "log", max_bytes=0)
    store.close()


def test_the_record_says_what_was_retired_when_and_from_which_hash_to_which(tmp_path: Path) -> None:
    """Sequences, hashes, size: taken from the segments, and one segment leads to the next."""
    log = _closed(tmp_path / "log")
    whole = {frame.first_sequence: frame for frame in read_log(log)}
    sizes = {path.name: path.stat().st_size for path in _segments(log)}
    before_ns = time.time_ns()
    gone = retire(log, max_bytes=_BUDGET)
    assert gone == read_retirements(log)
    assert [each.num_bytes for each in gone] == [sizes[each.segment] for each in gone]
    for one, other in itertools.pairwise(gone):
        assert (one.last_sequence + 1, one.head_hash) == (other.first_sequence, other.previous_head_hash)
    assert gone[-1].head_hash == whole[gone[-1].last_sequence - 1].chain_hash.hex()
    assert all(before_ns <= each.retired_at_unix_ns <= time.time_ns() for each in gone)


def test_a_segment_deleted_by_hand_is_missing_and_not_retired(tmp_path: Path) -> None:
    """Without a record, the first segment and any other are damage, also behind ones that were retired."""
    whole = _closed(tmp_path / "whole")
    for is_retired, number in itertools.product((False, True), (0, 1, 2)):
        log = tmp_path / f"{is_retired}-{number}"
        shutil.copytree(whole, log)
        if is_retired:
            assert retire(log, max_bytes=_size(log) - 2 * _SEGMENT_BYTES)
        victim = _segments(log)[number]
        victim.unlink()
        reader = read_log(log)
        assert list(reader)
        assert [(damage.kind, damage.sequence) for damage in reader.damage] == [("missing_segment", 1)] or (
            [(damage.kind, damage.sequence) for damage in reader.damage] == [("missing_segment", int(victim.stem))]
        )


def test_a_log_that_does_not_follow_from_the_recorded_hash_is_found_out(tmp_path: Path) -> None:
    """The segments that were kept are those of another history: their first header names another hash."""
    log = _closed(tmp_path / "log")
    retire(log, max_bytes=_BUDGET)
    record = log / RETIREMENTS_NAME
    last = read_retirements(log)[-1]
    record.write_text(record.read_text().replace(last.head_hash, "0" * 32))
    reader = read_log(log)
    assert list(reader)
    assert [damage.kind for damage in reader.damage] == ["chain_broken"]


def test_a_reader_that_is_half_way_reads_on_and_knows_what_was_retired(tmp_path: Path) -> None:
    """Segments go before it has come to them: it goes on with the first that is left, and calls nothing damaged."""
    log = _closed(tmp_path / "log")
    segments = _segments(log)
    reader = iter_reader = read_log(log)
    frames = iter(iter_reader)
    first = [next(frames) for _ in range(2)]
    gone = retire(log, max_bytes=_BUDGET)
    rest = list(frames)
    assert reader.damage == []
    in_first = [frame for frame in rest if frame.first_sequence < int(segments[1].stem)]
    assert [frame.first_sequence for frame in [*first, *in_first]] == list(range(1, int(segments[1].stem), 2))
    assert [each.segment for each in reader.retired] == [each.segment for each in gone[1:]]
    assert rest[-1].next_sequence == 121


def test_the_logs_of_earlier_starts_go_before_the_newest_and_vanish_whole(tmp_path: Path) -> None:
    """A closed log goes with its last segment; the directory above records it. Strangers' files stay."""
    for number, name in enumerate(("first", "second", "third")):
        for segment in _segments(_closed(tmp_path / name, 30)):
            _age(segment, hours=9 - 3 * number)
    (tmp_path / "notes.txt").write_text("not a log")
    (tmp_path / "second" / "notes.txt").write_text("not a part of it")
    budget = _size(tmp_path / "third") + 10
    gone = retire_logs(tmp_path, max_bytes=budget)
    assert [each.log for each in gone] == sorted(each.log for each in gone)
    assert not (tmp_path / "first").exists()
    assert [path.name for path in (tmp_path / "second").iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").exists()
    assert read_log(tmp_path / "third").header
    assert {each.log: each.last_sequence for each in read_retirements(tmp_path)} == {"first": 60, "second": 60}
    assert retire_logs(tmp_path, max_bytes=budget) == []


def test_a_log_in_use_keeps_its_last_segment_and_others_are_left_to_their_writers(tmp_path: Path) -> None:
    """With no budget at all: closed logs vanish, one's own keeps the segment in use, another's is not touched."""
    _closed(tmp_path / "closed")
    own, other = _write(tmp_path / "own"), _write(tmp_path / "other")
    others = _segments(tmp_path / "other")
    retire_logs(tmp_path, max_bytes=0, in_use=tmp_path / "own")
    assert not (tmp_path / "closed").exists()
    assert len(_segments(tmp_path / "own")) == 1
    assert _segments(tmp_path / "other") == others
    own.append(b"goes on", 1)
    assert read_log(tmp_path / "own").damage == []
    own.close()
    other.close()


def test_a_damaged_log_is_evidence_and_stays(tmp_path: Path) -> None:
    """Where a header cannot be read nothing is deleted of that log; others still are."""
    log = _closed(tmp_path / "logs" / "damaged")
    with _segments(log)[1].open("r+b") as segment:
        segment.write(b"damaged!")
    before = _segments(log)
    with pytest.raises(LogDamaged):
        retire(log, max_bytes=0)
    _closed(tmp_path / "logs" / "sound")
    retire_logs(tmp_path / "logs", max_bytes=0)
    assert _segments(log) == before
    assert not (tmp_path / "logs" / "sound").exists()


def test_a_log_that_cannot_be_read_spoils_the_retention_of_no_other(tmp_path: Path) -> None:
    """It is passed over and named; the limit is kept with the others."""
    unreadable = tmp_path / "logs" / "broken"
    unreadable.mkdir(parents=True)
    (unreadable / f"{1:020d}.kvlog").symlink_to(unreadable / f"{1:020d}.kvlog")  # too many levels, also for root
    _closed(tmp_path / "logs" / "sound")
    errors: list[Exception] = []
    assert retire_logs(tmp_path / "logs", max_bytes=0, on_trouble=errors.append)
    assert [type(error) for error in errors] == [RefusedFile]
    assert not (tmp_path / "logs" / "sound").exists()


@pytest.mark.xdist_group("log_torture")
@pytest.mark.parametrize("moment", ["before", "middle", "after"])
def test_a_process_killed_while_it_retires_leaves_a_log_that_verifies(
    tmp_path: Path, small_process: Executor, moment: Moment
) -> None:
    """At each change of a file: what is gone is recorded, what is there is read, and the next time finishes it."""
    whole = _closed(tmp_path / "whole", 40)
    killing = small_process.submit(kill_at_each_change_in_retiring, whole, tmp_path / "log", 1500, moment)
    assert killing.result() > 10


def test_a_machine_that_loses_power_while_it_retires_has_a_record_of_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion may reach the disk before or after others, never before the record of it."""
    log, found = _closed(tmp_path / "log", 40), tmp_path / "found"
    images: list[Image] = []
    power = PowerLoss.of(log, images.append)
    with monkeypatch.context() as patch:
        power.install(patch)
        retire(log, max_bytes=1500)
    assert len(images) > 20
    for image in images:
        shutil.rmtree(found, ignore_errors=True)
        image.write_to(found)
        reader = LogReader(found, settle_seconds=0)
        assert [frame.next_sequence for frame in reader][-1] == 81
        assert reader.damage == [], f"moment {image.moment}, lost {image.lost}, {image.num_names_kept} names kept"


def test_a_directory_that_cannot_be_listed_is_told_and_nothing_is_raised(tmp_path: Path) -> None:
    """Retention has trouble of its own; the writer never hears of it."""
    troubles: list[Exception] = []
    maintenance = Maintenance(0, on_trouble=troubles.append)
    logs, hidden = tmp_path / "logs", tmp_path / "hidden"
    store = _write(logs / "log", 5, maintenance)
    maintenance.wait()
    logs.rename(hidden)
    logs.touch()
    maintenance.start(store.segment, 1)
    maintenance.wait()
    assert [type(trouble) for trouble in troubles] == [NotADirectoryError]
    logs.unlink()
    hidden.rename(logs)
    store.append(b"goes on", 1)
    store.close()


@pytest.mark.parametrize("has_reserve", [True, False])
def test_retiring_works_on_a_full_disk_and_does_what_the_dry_run_said(tmp_path: Path, *, has_reserve: bool) -> None:
    """`kvledger retire` had to write its record first, and failed although `--dry-run` promised 892 KiB."""
    disk = tmp_path / "disk"

    def look() -> None:
        for vanishes in (False, True):
            log = _closed(disk / f"{vanishes}" / "log")
            if not has_reserve:
                (log / RETIREMENTS_NAME).unlink()
            end = [frame.next_sequence for frame in read_log(log)][-1]
            ballast = fill(disk)
            if vanishes:
                told = retire_logs(log.parent, max_bytes=0, dry_run=True)
            else:
                told = retire(log, max_bytes=_BUDGET, dry_run=True)
            gone = retire_logs(log.parent, max_bytes=0) if vanishes else retire(log, max_bytes=_BUDGET)
            assert [each.segment for each in gone] == [each.segment for each in told] != []
            if vanishes:
                assert not log.exists()
                assert read_retirements(log.parent) == gone[-1:]
            else:
                assert read_retirements(log) == gone
                reader = read_log(log)
                assert [frame.next_sequence for frame in reader][-1] == end
                assert (reader.damage, reader.retired) == ([], gone)
            ballast.unlink()

    run_on_small_disk(disk, 1 << 18, look)


@pytest.mark.parametrize(
    "moment", [pytest.param("before", marks=pytest.mark.long), "middle", pytest.param("after", marks=pytest.mark.long)]
)
def test_a_process_killed_while_it_retires_on_a_full_disk_leaves_no_damage(tmp_path: Path, moment: Moment) -> None:
    """The record is in the room that was reserved for it, before the segment is gone; also of a log that vanishes."""
    disk, whole = tmp_path / "disk", _closed(tmp_path / "whole", 40)

    def look() -> None:
        for vanishes in (False, True):
            killing = kill_at_each_change_on_full_disk(whole, disk, moment, vanishes=vanishes)
            assert killing > 10

    run_on_small_disk(disk, 1 << 18, look)


def test_room_is_made_with_the_oldest_segments_until_there_is_enough(tmp_path: Path) -> None:
    """No more goes than has to; where everything has gone, that is all there is."""
    disk = tmp_path / "disk"

    def look() -> None:
        log = SegmentEventStore.create(disk / "logs" / "log", {}, segment_bytes=16_384)
        while log.next_sequence < 400:
            log.append(bytes(1000), 2)
        log.close()
        segments = _segments(log.directory)
        fill(disk)
        made = make_room(disk / "logs", 40_000)
        assert [each.segment for each in made] == [path.name for path in segments[:3]]
        assert {each.reason for each in made} == {"full"}
        assert make_room(disk / "logs", 40_000) == []
        make_room(disk / "logs", 1 << 30)
        assert not log.directory.exists()

    run_on_small_disk(disk, 1 << 19, look)
