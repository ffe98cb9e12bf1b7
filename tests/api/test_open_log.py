"""`open_log`: of one log or of many, what it leaves alone, and what it says when it cannot answer."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver
from log_fuzz.mutations import KINDS
from log_fuzz.seeds import told
from stored_logs import OPENED_AT, header_of, write_log

import kvledger
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events
from kvledger.storage.events import SegmentEventStore
from kvledger.storage.events.segment_file import read_header, segment_paths

REQUEST = "chat-17-b6"


def everything(log: kvledger.Log) -> list[Any]:
    """Every record of every kind."""
    records: list[Any] = [*log.entries(), *log.lookups(), *log.copies(), *log.steps(), *log.evictions()]
    for request in log.requests():
        records += [request, *request.lives, *request.why()]
    return [*records, log.verify()]


def files_of(directory: Path) -> dict[Path, tuple[bytes, int]]:
    """Each file with its bytes and the time of its last change."""
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in directory.rglob("*") if file.is_file()}


# --- one log and many ---------------------------------------------------------------------------


def test_a_log_and_a_segment_of_it_are_the_same_to_a_reader(log: Path) -> None:
    """Also as text. What begins in the middle of a log has entries, too."""
    (segment,) = segment_paths(log)
    opened = kvledger.open_log(str(log))
    assert [entry.event for entry in kvledger.open_log(segment).entries()] == [each.event for each in opened.entries()]
    assert opened.header["kvledger_version"] == "0.1.0"
    (start,) = opened.starts
    assert (start.name, start.path, start.worker_paths) == ("log", log, ())
    assert start.opened_at_unix_ns == OPENED_AT
    assert "vocabulary" not in repr(opened)


def test_each_record_names_its_start_the_oldest_first(log_dir: Path) -> None:
    """A directory is one log; requests are looked for in all of its starts."""
    log = kvledger.open_log(log_dir)
    assert [start.name for start in log.starts] == ["first", "second"]
    assert log.header["engine_id"] == "second"
    for records in (log.entries(), log.requests(), log.lookups(), log.copies(), log.steps()):
        names = [record.start for record in records]
        assert names == sorted(names)
        assert set(names) == {"first", "second"}
    request = log.request("chat-1")
    assert (request.start, request.request_id) == ("first", "chat-1-aa")
    assert {reason.start for reason in request.why()} == {"first"}
    assert [(each.start, each.rank) for each in log.verify().logs] == [("first", None), ("first", 0), ("second", None)]


def test_the_log_of_a_worker_belongs_to_its_start_and_has_entries_alone(tmp_path: Path, story: Driver) -> None:
    """Only a recorded connector has such logs; its scheduler's log has the requests."""
    failed = e.HookFailed("register_kv_caches", "", "RuntimeError: no device", 3)
    header = {"engine_id": "one"}
    write_log(tmp_path / "run" / "scheduler", story.observed, story.configuration, header=header)
    write_log(tmp_path / "run" / "worker", [failed], story.configuration, header={**header, "worker_rank": 1})
    log = kvledger.open_log(tmp_path / "run")
    (start,) = log.starts
    assert (start.name, [path.name for path in start.worker_paths]) == ("scheduler", ["worker"])
    entries = list(log.entries())
    assert [entry.event for entry in entries if entry.rank == 1] == [failed]
    assert [entry.sequence for entry in entries if entry.rank is None] == [*range(1, len(story.observed) + 1)]
    assert {request.request_id for request in log.requests()} == {REQUEST, "chat-9"}
    assert [(each.rank, each.rule) for each in log.violations()] == [(1, "RECORDED")]


# --- what reading leaves alone ------------------------------------------------------------------


def test_reading_changes_no_file_of_a_log_and_prints_nothing(log_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor does it add one, such as a lock."""
    before = files_of(log_dir)
    assert everything(kvledger.open_log(log_dir))
    assert files_of(log_dir) == before
    assert capfd.readouterr() == ("", "")


def test_a_log_is_read_while_it_is_written(story: Driver, tmp_path: Path) -> None:
    """The writer holds its lock and goes on; a new reading has what came since."""
    store = SegmentEventStore.create(tmp_path / "log", header_of(story.configuration))
    store.append(encode_events(story.observed[:20]), 20)
    log = kvledger.open_log(tmp_path / "log")
    assert len(list(log.entries())) == 20
    assert log.verify().logs[0].ended == "open"
    store.append(encode_events(story.observed[20:]), len(story.observed) - 20)
    assert len(list(log.entries())) == len(story.observed)
    store.close()
    assert log.verify().logs[0].ended == "closed"


def test_two_readings_at_once_do_not_disturb_each_other(log: Path) -> None:
    """A program may compare one part of a log with another."""
    opened = kvledger.open_log(log)
    pairs = list(zip(opened.entries(), opened.entries(), strict=True))
    assert pairs
    assert all(one == other for one, other in pairs)


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind", "reason", "remedy"),
    [
        (lambda _: None, kvledger.LogNotFound, "does not exist", "give a log directory or a *.kvlog file"),
        (lambda path: path.mkdir(), kvledger.LogNotFound, "contains no log", "give the log_dir or a log"),
        (lambda path: path.write_text("hello"), kvledger.LogUnreadable, "too few for a segment header", "another log"),
        (lambda path: path.symlink_to("gone"), kvledger.LogUnreadable, "cannot be read", "fix or remove the link"),
    ],
    ids=["missing", "empty", "no log", "dead link"],
)
def test_a_path_without_a_log_is_an_error_that_names_it_the_reason_and_the_remedy(
    tmp_path: Path, make: Any, kind: type[kvledger.Error], reason: str, remedy: str
) -> None:
    """All of them have one base."""
    make(tmp_path / "asked")
    with pytest.raises(kvledger.Error) as raised:
        kvledger.open_log(tmp_path / "asked")
    assert type(raised.value) is kind
    assert str(tmp_path / "asked") in str(raised.value)
    assert reason in str(raised.value)
    assert remedy in str(raised.value)


def test_an_unknown_request_is_an_error_that_offers_others(log: Path) -> None:
    """The nearest, or else the last ones."""
    opened = kvledger.open_log(log)
    with pytest.raises(kvledger.RequestNotFound, match=r"no request has 'chat-71' in its id; did you mean: chat-"):
        opened.request("chat-71")
    with pytest.raises(kvledger.RequestNotFound, match=r"no request has 'zzz' in its id; the last requests: chat-9"):
        opened.request("zzz")


def test_a_part_of_several_ids_is_an_error_that_names_them(log: Path) -> None:
    """One of them can be copied from there."""
    with pytest.raises(
        kvledger.RequestAmbiguous, match=r"'chat' is in the ids of several requests.*chat-9, chat-17-b6"
    ):
        kvledger.open_log(log).request("chat")


def test_an_id_in_several_starts_is_an_error_that_names_their_logs(log_dir: Path) -> None:
    """Each can be opened by itself."""
    shutil.copytree(log_dir / "first", log_dir / "third")
    with pytest.raises(kvledger.RequestAmbiguous) as raised:
        kvledger.open_log(log_dir).request("chat-1")
    assert "chat-1-aa is in 2 logs; name one of them" in str(raised.value)
    assert str(log_dir / "third") in str(raised.value)
    assert kvledger.open_log(log_dir / "third").request("chat-1").start == "third"


def test_a_log_of_many_that_cannot_be_read_is_named_and_the_others_are_read(log_dir: Path) -> None:
    """A question that it might answer says that it was not asked."""
    (segment,) = segment_paths(log_dir / "second")
    segment.write_bytes(b"KVLEDGER" + bytes(64))
    log = kvledger.open_log(log_dir)
    assert [start.name for start in log.starts] == ["first"]
    (error,) = log.unreadable
    assert str(log_dir / "second") in str(error)
    with pytest.raises(kvledger.RequestNotFound, match="1 log could not be read, see `unreadable`"):
        log.request("chat-2")
    report = log.verify()
    assert report.verdict is kvledger.Verdict.DAMAGED
    assert str(error) in str(report)


def test_a_log_without_its_header_has_entries_and_lives_and_no_reasons(log: Path, story: Driver) -> None:
    """The sizes of blocks and chunks stood there."""
    (segment,) = segment_paths(log)
    num_bytes = read_header(segment).num_bytes
    segment.write_bytes(bytes(num_bytes) + segment.read_bytes()[num_bytes:])
    opened = kvledger.open_log(log)
    assert opened.header == {}
    assert len(list(opened.entries())) == len(story.observed)
    assert [request.request_id for request in opened.requests()] == [REQUEST, "chat-9"]
    with pytest.raises(kvledger.LogUnreadable, match="which has the configuration, is intact"):
        list(opened.request(REQUEST).why())
    assert opened.verify().verdict is kvledger.Verdict.DAMAGED


def test_events_of_a_newer_version_are_refused_or_skipped(story: Driver, tmp_path: Path) -> None:
    """The remedy is an argument of `open_log`, and not an option of the command."""
    vocabulary = header_of(story.configuration)["vocabulary"]
    assert isinstance(vocabulary, list)
    newer = {"vocabulary": [*vocabulary, {"id": "moon.landed", "version": 1, "fields": []}]}
    log = write_log(tmp_path / "log", story.observed, story.configuration, header=newer)
    with pytest.raises(kvledger.LogUnreadable) as raised:
        kvledger.open_log(log)
    assert "moon.landed" in str(raised.value)
    assert "skip unknown events with lenient=True" in str(raised.value)
    assert len(list(kvledger.open_log(log, lenient=True).entries())) == len(story.observed)


def test_what_a_log_names_cannot_steer_a_terminal(tmp_path: Path) -> None:
    """A client chooses its request's id, and an error or a reason is printed sooner or later."""
    driver = Driver()
    driver.start("a\x1b[2Jb", (), 20, (1, 2))
    driver.ledger.commit()
    log = kvledger.open_log(write_log(tmp_path / "log", driver.observed, driver.configuration))
    printed = [*map(str, log.entries()), *map(str, log.request("a").why()), str(log.verify())]
    with pytest.raises(kvledger.RequestNotFound) as raised:
        log.request("nobody")
    assert not [line for line in (*printed, str(raised.value)) if "\x1b" in line]
    assert "a\\u001b[2Jb" in str(raised.value)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 30))])
def test_a_changed_log_gives_records_or_an_error_that_names_it(seed: int, tmp_path: Path) -> None:
    """Whatever was done to its bytes, its frames or its values, checksums repaired."""
    print(f"seed {seed}")
    chance, logs, unnamed = random.Random(seed), told(), []
    for number in range(8):
        changed = chance.choice(KINDS)(chance.choice(logs), chance)
        path = changed.write(tmp_path / str(number) / "log")
        try:
            everything(kvledger.open_log(path))
        except kvledger.Error as error:
            unnamed += [] if str(path.parent) in str(error) else [f"{changed.text}: {error}"]
    assert unnamed == []
