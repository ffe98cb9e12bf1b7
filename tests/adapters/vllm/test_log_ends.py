"""What the connector tells people of a log that cannot be written, and of the log before that was not closed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from log_torture.mounts import fill, run_on_small_disk
from processes import run_and_kill

from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.vllm import event_log
from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.adapters.vllm.event_log import OpenedLog, open_event_log
from kvledger.lifecycle import Core, Ledger, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events

CONFIGURATION = LedgerConfiguration(block_size=16, chunk_size=16, num_slots=8)


def _open(log_dir: Path, **settings: object) -> OpenedLog:
    extra_config = {"log_dir": str(log_dir), **settings}
    return open_event_log(Core.standard(), ConnectorSettings.from_extra_config(extra_config), CONFIGURATION)


def _write(log: OpenedLog, num_notes: int) -> None:
    ledger = Ledger(Core.standard(), CONFIGURATION, log.store)
    for number in range(num_notes):
        ledger.observe(e.LogNote(f"note {number}", number))
        ledger.commit()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_a_disk_that_stays_full_until_the_engine_is_killed_is_known_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], signal_number: int
) -> None:
    """`verify` says how many events are missing at the end and why, with exit code 4; the next start says so, too."""
    disk, found = tmp_path / "disk", tmp_path / "found.json"

    def work() -> None:
        def serve() -> None:
            log = _open(disk / "logs", segment_bytes=16384)
            _write(log, 20)
            fill(disk)
            _write(log, 759)
            log.store.flush()

        run_and_kill(serve, signal_number)
        (directory,) = (disk / "logs").iterdir()
        exit_code = main(["verify", str(directory), "--json"])
        objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        (disk / "ballast").unlink()
        remarks = _open(disk / "logs").remarks
        found.write_text(json.dumps([exit_code, objects, directory.name, remarks]))

    run_on_small_disk(disk, 128 << 10, work)
    exit_code, objects, name, remarks = json.loads(found.read_text())
    assert exit_code == 4
    (end,) = [item for item in objects if item["type"] == "end"]
    (verdict,) = [item for item in objects if item["type"] == "verdict"]
    missing = end["missing"]
    assert (end["end"], missing["kind"], verdict["verdict"]) == ("cut_off", "unwritten_events", "end_missing")
    assert missing["first_sequence"] + missing["num_events"] == 20 + 759 + 1
    assert missing["num_events"] > 500
    assert missing["detail"].endswith("could not be written: [Errno 28] No space left on device")
    assert remarks == [f"the log before, {name}, lacks its end: {missing['detail']}"]


def test_messages_name_what_waits_and_where_and_when_it_is_written_again(
    tmp_path: Path, told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, not at each attempt; the message names kvledger, the log, the number of events and the remedy."""
    monkeypatch.setattr(event_log, "_SECONDS_BETWEEN_MESSAGES", float("inf"))
    log = _open(tmp_path)
    store: Any = log.store
    append = store._store.append

    def refuse(*_arguments: object, **_options: object) -> int:
        raise OSError(28, "No space left on device")

    store._store.append = refuse
    _write(log, 40)
    store._store.append = append
    store.flush()
    log.close()
    first, last = told.messages
    for part in (
        "kvledger: the log cannot be written",
        str(log.directory),
        "num_events_waiting=1",
        "its disk is full: delete other files, or old logs with `kvledger retire`",
    ):
        assert part in first
    written_again = "kvledger: the log can be written again"
    for part in (written_again, str(log.directory), "num_events_written=40", "num_events_lost=0"):
        assert part in last


@pytest.mark.parametrize(
    ("number", "cause", "remedy"),
    [
        (errno.ENOSPC, "its disk is full", "delete other files"),
        (errno.EDQUOT, "its disk is full", "delete other files"),
        (errno.EACCES, "this process lacks the right to write to log_dir", "give it this right"),
        (errno.EROFS, "this process lacks the right to write to log_dir", "give it this right"),
        (errno.EIO, "the disk reports an error", "check the disk"),
        (errno.ETIMEDOUT, "its disk is slow", "move log_dir to a faster disk"),
    ],
)
def test_each_cause_has_its_own_message_and_remedy(
    tmp_path: Path, told: pytest.LogCaptureFixture, number: int, cause: str, remedy: str
) -> None:
    """A disk that was 31 % full and slow for 50 ms was reported as full."""
    log = _open(tmp_path)
    store: Any = log.store
    append = store._store.append

    def refuse(*_arguments: object, **_options: object) -> int:
        raise OSError(number, os.strerror(number))

    store._store.append = refuse
    _write(log, 3)
    store._store.append = append
    store.flush()
    log.close()
    (first, _) = told.messages
    assert f"because {cause}" in first
    assert remedy in first
    assert "free the disk" not in first


def test_a_disk_that_is_slow_and_then_full_is_reported_as_both(
    tmp_path: Path, told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cause that is new is not held back by the minute of the one before."""
    monkeypatch.setattr(event_log, "_SECONDS_BETWEEN_MESSAGES", float("inf"))
    log = _open(tmp_path)
    store: Any = log.store
    for error in (TimeoutError("late"), TimeoutError("late"), OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "io")):
        store._on_trouble(error, 1)
    log.close()
    assert [message.split("because ")[1].split(":")[0] for message in told.messages] == [
        "its disk is slow",
        "its disk is full",
        "the disk reports an error",
    ]


def test_a_message_at_shutdown_names_what_was_never_written(tmp_path: Path, told: pytest.LogCaptureFixture) -> None:
    """Closing tries once more, in vain."""
    log = _open(tmp_path)
    store: Any = log.store

    def refuse(*_arguments: object, **_options: object) -> int:
        raise OSError(28, "No space left on device")

    store._store.append = refuse
    _write(log, 40)
    log.close()
    assert "lacks events that could not be written" in told.messages[-1]
    assert "num_events_lost=40" in told.messages[-1]
    assert str(log.directory) in told.messages[-1]


def test_a_start_notes_how_the_log_before_ended(tmp_path: Path) -> None:
    """Nothing of one that was closed or is being written; a log in another one's words is read, never written."""
    first = _open(tmp_path)
    assert first.remarks == ()
    assert _open_in_order(tmp_path).remarks == ()  # somebody writes the first
    first.close()
    run_and_kill(lambda: _write(_open_in_order(tmp_path), 3))
    (*_, cut_off) = sorted(tmp_path.iterdir())
    before = _without_lock(cut_off)
    third = _open_in_order(tmp_path)
    assert third.remarks == (f"the log before, {cut_off.name}, was cut off: its process ended without closing it",)
    assert _without_lock(cut_off) == before
    third.close()
    assert _open_in_order(tmp_path).remarks == ()


def _without_lock(log: Path) -> dict[Path, bytes]:
    """The files of a log; retention takes its lock for a moment, and names itself in it."""
    return {path: path.read_bytes() for path in log.iterdir() if path.name != "writer.lock"}


def _open_in_order(log_dir: Path) -> OpenedLog:
    """One whose name is the last in order, however fast one comes after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_log.time, "strftime", lambda *_: f"29990101T0000{len(list(log_dir.iterdir())):02}Z")
        return _open(log_dir)


def test_a_directory_that_cannot_be_read_does_not_hide_the_log_before(tmp_path: Path) -> None:
    """What lies beside the logs may be somebody else's."""
    first = _open(tmp_path)
    first.store.note_unwritten(5, "the disk was full")
    first.close()
    newer, older = tmp_path / "99991231T000000Z-1-000000", tmp_path / "10000101T000000Z-1-000000"
    for other in (newer, older):
        other.mkdir()
        (other / "00000000000000000001.kvlog").symlink_to("/proc/self/mem")  # reading it is an I/O error
    second = _open(tmp_path)
    second.close()
    assert len(second.remarks) == 1
    assert "lacks its end" in second.remarks[0]


def test_a_start_notes_a_newest_segment_that_is_gone_and_reads_none_where_nothing_is_doubtful(tmp_path: Path) -> None:
    """A full segment takes a second to read."""
    log = _open(tmp_path, segment_bytes=16384)
    _write(log, 300)
    log.close()
    assert log.directory is not None
    newest = max(log.directory.glob("*.kvlog"))
    whole = newest.read_bytes()
    newest.write_bytes(b"nothing that can be read")
    assert _remarks(tmp_path) == ()
    newest.unlink()
    (remark,) = _remarks(tmp_path)
    assert remark.startswith(f"the log before, {log.directory.name}, lacks its end: log.end names a later segment, ")
    newest.write_bytes(whole)
    assert _remarks(tmp_path) == ()


def _remarks(log_dir: Path) -> tuple[str, ...]:
    """What a start says of the newest log there; its own log is gone afterwards."""
    log = _open_in_order(log_dir)
    log.close()
    assert log.directory is not None
    shutil.rmtree(log.directory)
    return log.remarks


def _missing(capsys: pytest.CaptureFixture[str]) -> Any:
    """What `verify --json` says of the end."""
    (end,) = [each for each in map(json.loads, capsys.readouterr().out.splitlines()) if each["type"] == "end"]
    return end["missing"]


def _dropped(store: Any, number: int) -> None:
    """A write that fails and is not tried again."""
    original, calls = store._store.append, []

    def append(*arguments: Any, **options: Any) -> int:
        calls.append(1)
        if len(calls) == number:
            raise OSError(errno.EIO, "Input/output error")
        return int(original(*arguments, **options))

    store._store.append = append
    store._keep = lambda _frame: None
    store._failed = lambda _error: None


def _refused(store: Any, number: int) -> None:
    """A frame that the store does not take, such as one that is too large."""
    original, calls = store.append, []

    def append(*arguments: Any, **options: Any) -> int:
        calls.append(1)
        if len(calls) == number:
            raise ValueError("no")
        return int(original(*arguments, **options))

    store.append = append


def _swallowed(store: Any, number: int) -> None:
    """A thread that takes the last frames and writes none of them."""
    original, calls = store.append, []

    def append(*arguments: Any, **options: Any) -> int:
        calls.append(1)
        return 0 if len(calls) >= number else int(original(*arguments, **options))

    store.append = append


def _stuck(store: Any, number: int) -> None:
    """The last frames wait in a backlog that closing forgets."""
    _refused(store, number)
    original = store.append

    def append(*arguments: Any, **options: Any) -> int:
        try:
            return int(original(*arguments, **options))
        except ValueError as error:
            raise OSError(errno.EIO, "Input/output error") from error

    store.append = append


@pytest.mark.parametrize("lose", [_dropped, _refused, _swallowed, _stuck])
@pytest.mark.parametrize("number", [3, 10])
def test_events_that_get_lost_between_ledger_and_store_are_missing_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lose: Any, number: int
) -> None:
    """A log that lacked them, and whose writer had closed it, was called sound: the ledger's own count tells."""
    log = _open(tmp_path)
    lose(log.store, number)
    ledger = Ledger(Core.standard(), CONFIGURATION, log.store)
    for at in range(10):
        ledger.observe(e.LogNote(f"note {at}", at))
        with contextlib.suppress(Exception):  # as the journal does
            ledger.commit()
    is_late = lose is _stuck and number < 10  # the next commit took them
    log.close(ledger.next_sequence)
    exit_code = main(["verify", str(log.directory), "--json"])
    missing = _missing(capsys)
    if is_late:
        assert (exit_code, missing) == (0, None)
        return
    assert exit_code == 4
    assert (missing["kind"], missing["first_sequence"]) == ("unwritten_events", number)
    assert missing["num_events"] == 11 - number
    main(["verify", str(log.directory)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "sound, but its end is missing" in printed
    assert (
        f"the writer had recorded {'sequence 10' if number == 10 else 'sequences 3 to 10'} when it closed the log"
        in printed
    )


def test_lost_events_are_missing_also_where_the_last_sync_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: the end was not noted after an EIO, and the log was sound up to where it was cut off."""
    log = _open(tmp_path, durability="disk")
    _swallowed(log.store, 3)
    ledger = Ledger(Core.standard(), CONFIGURATION, log.store)
    for at in range(5):
        ledger.observe(e.LogNote(f"note {at}", at))
        ledger.commit()

    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        log.close(ledger.next_sequence)
    assert main(["verify", str(log.directory), "--json"]) == 4
    missing = _missing(capsys)
    assert (missing["first_sequence"], missing["num_events"]) == (3, 3)


def test_an_engine_tells_its_log_how_much_it_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make_engine: Any
) -> None:
    """The connector's `shutdown` hands over the ledger's count."""
    engine = make_engine(num_blocks=14, chunk_size=8, log_dir=str(tmp_path), replays=False)
    engine.add_crowd()
    side = engine.connector.scheduler_side
    for _ in range(20):
        engine.step()
    _dropped(side.log.store, 1)
    engine.run()
    engine.shutdown()
    lacking = side.ledger.next_sequence - side.log.store._store.next_sequence
    assert lacking > 100
    assert main(["verify", str(side.log.directory), "--json"]) == 4
    assert _missing(capsys)["num_events"] == lacking


def test_more_events_than_were_recorded_are_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody else wrote into the log."""
    log = _open(tmp_path)
    ledger = Ledger(Core.standard(), CONFIGURATION, log.store)
    ledger.observe(e.LogNote("note", 1))
    ledger.commit()
    log.store.append(encode_events([e.LogNote("another", 2)]), 1)
    log.close(ledger.next_sequence)
    assert main(["verify", str(log.directory)]) == 2
    assert "the writer had recorded 1 events, but this log has 2" in " ".join(capsys.readouterr().out.split())


def test_an_event_that_cannot_be_encoded_breaks_a_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was replaced by a note, and a log that lacked an observation was called sound."""
    log = _open(tmp_path)
    ledger = Ledger(Core.standard(), CONFIGURATION, log.store)
    ledger.observe(e.LogNote("note", 1))
    ledger.observe(e.CacheReset(1 << 70))
    ledger.commit()
    log.close(ledger.next_sequence)
    assert main(["verify", str(log.directory)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "hook commit raised: cache.reset cannot be encoded: OverflowError" in printed
