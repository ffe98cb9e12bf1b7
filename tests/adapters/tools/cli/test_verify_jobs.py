"""`kvledger verify --jobs`: what several processes print is what one prints, byte for byte, whatever the log is."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
from lifecycle_driver import Driver, play_seed
from stored_logs import OPENED_AT, header_of, replaced, serve_many, tell_story
from stored_logs import write_log as write_segments

from kvledger.adapters.tools.cli import verify
from kvledger.adapters.tools.exit_codes import CommandFailed
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.processes import Processes
from kvledger.adapters.tools.logs.snapshots import write_snapshots
from kvledger.lifecycle import LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events
from kvledger.storage.events import SegmentEventStore, Snapshot, write_snapshot
from kvledger.storage.events.segment_file import segment_paths

SEGMENT_BYTES = 16_000


def write_log(directory: Path, events: Sequence[e.Event], configuration: LedgerConfiguration) -> Path:
    """A log of several segments, each but the first with a snapshot, as far as the events can be folded."""
    log = write_segments(directory, events, configuration, segment_bytes=SEGMENT_BYTES)
    with contextlib.suppress(CommandFailed):
        write_snapshots(open_log(log))
    return log


@pytest.fixture(scope="module")
def walked() -> Driver:
    """Breaks rules here and there, in all parts of its log."""
    return play_seed(3, 140, chunk_size=16, block_size=16)


@pytest.fixture(scope="module")
def sound() -> Any:
    """A driver whose log is sound."""
    return serve_many(150)


@pytest.fixture(scope="module")
def others() -> Iterator[Processes]:
    """Two, for all logs."""
    started = Processes(2)
    yield started
    started.end()


@pytest.fixture
def in_parts(others: Processes, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each log so far that several processes verified: whether their findings were used."""
    used: list[bool] = []
    real = verify.verify_in_parts

    def noted(*arguments: Any) -> Any:
        findings = real(*arguments)
        used.append(findings is not None)
        return findings

    monkeypatch.setattr(verify, "MIN_BYTES", 0)
    monkeypatch.setattr(verify, "processes", lambda _: contextlib.nullcontext(others))
    monkeypatch.setattr(verify, "verify_in_parts", noted)
    return used


def assert_alike(run: Any, log: Path, *options: object) -> Any:
    """Text, JSON and exit code are the same with one process, two, and four that share the rules; returns the JSON."""
    for form in ((), ("--json",)):
        one, *several = (run("verify", *form, *options, "--jobs", jobs, log) for jobs in (1, 2, 4))
        assert several == [one, one]
    return one


def flip(path: Path, offset: int) -> None:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def changed_midway(events: Sequence[e.Event], event_class: type[e.Event], **fields: object) -> list[e.Event]:
    """With fields of an event in the middle replaced."""
    return replaced(events, event_class, sum(type(event) is event_class for event in events) // 2, **fields)


def test_a_sound_log_is_verified_in_parts(run: Any, sound: Any, tmp_path: Path, in_parts: list[bool]) -> None:
    """Each part from the snapshot at its beginning, and each rule once."""
    log = write_log(tmp_path / "log", sound.observed, sound.configuration)
    assert len(list(log.glob("*.snapshot"))) > 1
    assert assert_alike(run, log).exit_code == 0
    assert in_parts == [True] * 4


def test_broken_rules_are_named_in_their_order(run: Any, walked: Driver, tmp_path: Path, in_parts: list[bool]) -> None:
    """Also where those who found them are different processes."""
    log = write_log(tmp_path / "log", walked.observed, walked.configuration)
    result = assert_alike(run, log)
    assert result.exit_code == 1
    assert len(result.objects("violation")) > 1
    assert in_parts == [True] * 4


@pytest.mark.parametrize("selection", [("--since", 400), ("--until", 400), ("--since", 300, "--until", 777)])
def test_of_a_selected_part_no_more_is_reported(
    run: Any, walked: Driver, tmp_path: Path, in_parts: list[bool], selection: tuple[object, ...]
) -> None:
    """Wherever the parts are cut."""
    log = write_log(tmp_path / "log", walked.observed, walked.configuration)
    assert_alike(run, log, *selection)
    assert all(in_parts)


def test_other_decisions_are_found_in_the_part_where_they_are(
    run: Any, sound: Any, tmp_path: Path, in_parts: list[bool]
) -> None:
    """The next part begins with what was recorded, as one pass goes on with it."""
    events = changed_midway(sound.observed, e.SaveIssued, slots=(7,))
    result = assert_alike(run, write_log(tmp_path / "log", events, sound.configuration))
    assert result.objects("divergence")
    assert in_parts == [True] * 4


def test_a_log_that_ends_too_early_lacks_its_last_decision(
    run: Any, sound: Any, tmp_path: Path, in_parts: list[bool]
) -> None:
    """It is the log's end that tells, not that of a part."""
    events = list(sound.observed)
    while not events[-1].is_decision:
        events.pop()
    result = assert_alike(run, write_log(tmp_path / "log", events[:-1], sound.configuration))
    assert [each["recorded"] for each in result.objects("divergence")] == [None]
    assert in_parts == [True] * 4


def torn(log: Path) -> None:
    """The last frame is half written."""
    last = segment_paths(log)[-1]
    last.write_bytes(last.read_bytes()[:-7])


def flipped(log: Path) -> None:
    """A frame in the middle is damaged."""
    middle = segment_paths(log)[1]
    flip(middle, middle.stat().st_size // 2)


def without_segment(log: Path) -> None:
    """A segment in the middle is gone."""
    segment_paths(log)[1].unlink()


def rechained(log: Path) -> None:
    """A segment stands where another did: the chain is broken."""
    other = write_log(log.parent / "other", serve_many(100).observed, serve_many(1).configuration)
    segment_paths(log)[-1].write_bytes(segment_paths(other)[-1].read_bytes())


@pytest.mark.parametrize("damage", [torn, flipped, without_segment, rechained])
def test_a_damaged_log_is_judged_up_to_the_damage(
    run: Any, sound: Any, tmp_path: Path, in_parts: list[bool], damage: Callable[[Path], None]
) -> None:
    """The parts behind it are not asked."""
    log = write_log(tmp_path / "log", sound.observed, sound.configuration)
    damage(log)
    assert assert_alike(run, log).exit_code == 2
    assert in_parts


def test_a_snapshot_that_is_not_what_the_log_folds_to_hides_nothing(
    run: Any, sound: Any, tmp_path: Path, in_parts: list[bool]
) -> None:
    """Whoever can write one could hide a decision behind it: nobody begins from it, and one pass is made."""
    events = changed_midway(sound.observed, e.SaveIssued, slots=(7,))
    log = write_log(tmp_path / "log", events, sound.configuration)
    honest = assert_alike(run, log)
    for path in log.glob("*.snapshot"):
        forge(path, write_log(tmp_path / path.stem, sound.observed, sound.configuration) / path.name)
    in_parts.clear()
    assert assert_alike(run, log) == honest
    assert in_parts == [False] * 4


def forge(snapshot: Path, other: Path) -> None:
    """Put the state of another one into a snapshot, which stays intact and at its place."""
    fields, state = (decoded(path) for path in (snapshot, other))
    write_snapshot(snapshot.with_suffix(".kvlog"), attrs.evolve(fields, state=state.state))


def decoded(path: Path) -> Snapshot:
    """What a snapshot's file holds."""
    return msgspec.msgpack.decode(path.read_bytes()[len(b"KVLEDGERSNAP") + 4 :], type=Snapshot)


def test_a_log_that_is_being_written_is_read_once(run: Any, sound: Any, tmp_path: Path, in_parts: list[bool]) -> None:
    """Two who read it might find two ends."""
    store = SegmentEventStore.create(tmp_path / "log", header_of(sound.configuration))
    store.append(encode_events(sound.observed[:1]), 1)
    assert_alike(run, tmp_path / "log")
    assert in_parts == [False] * 4
    store.close()


def test_several_logs_are_verified_side_by_side_and_printed_in_their_order(
    run: Any, sound: Any, walked: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sound, one broken, one unreadable, each with what is remarked of it."""
    monkeypatch.setattr(verify, "MIN_BYTES", 0)
    write_log(tmp_path / "logs/1", sound.observed, sound.configuration)
    write_log(tmp_path / "logs/2", walked.observed, walked.configuration)
    (tmp_path / "logs/3").mkdir()
    (tmp_path / "logs/3/00000000000000000001.kvlog").write_bytes(b"nothing")
    for form in ((), ("--json",)):
        one, two = (run("verify", *form, "--jobs", jobs, tmp_path / "logs") for jobs in (1, 2))
        assert two == one
        assert one.exit_code == 2
        assert one.err


def test_no_module_of_the_working_directory_runs_in_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: `verify --jobs`, run in the folder that a log came in, imported a planted `multiprocessing`."""
    for name in ("multiprocessing", "argparse", "sitecustomize", "signal", "runpy"):
        (tmp_path / f"{name}.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    started = Processes(1)
    try:
        assert started.submit(os.getpid).result() != os.getpid()
    finally:
        started.end()
    assert not (tmp_path / "ran").exists()
    assert "PYTHONSAFEPATH" not in os.environ


def test_processes_end_whatever_they_do() -> None:
    """Nobody is left behind when a command is interrupted."""
    started = Processes(1)
    number = started.submit(os.getpid).result()
    assert number != os.getpid()
    busy = started.submit(time.sleep, 3600)
    started.end()
    assert busy.cancelled() or busy.exception() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_processes_end_with_the_one_that_started_them() -> None:
    """Also where that one is killed and can do nothing about it."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        started = Processes(1)
        os.write(writer, b"%d" % started.submit(os.getpid).result())
        started.submit(time.sleep, 3600)
        os._exit(0)
    number = int(os.read(reader, 20))
    os.waitpid(child, 0)
    while Path(f"/proc/{number}").exists():
        time.sleep(0.01)


MORTAL = """
import os, signal
from multiprocessing import parent_process
from kvledger.lifecycle.handlers import New

class Mortal(New):
    def lookup_requested(self, turn, event):
        if parent_process() is not None and event.request_id.startswith("victim"):
            with open("killed", "a") as file:
                file.write(event.request_id + "\\n")
            if len(open("killed").readlines()) <= int(os.environ["KILLS"]):
                os.kill(os.getpid(), signal.SIGKILL)
        super().lookup_requested(turn, event)
"""
"""A handler that kills the process that verifies a log with a certain request, so many times."""


@pytest.fixture
def mortal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[str, ...]]:
    """Options of `verify` with which that many processes are killed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(verify, "MIN_BYTES", 0)
    (tmp_path / "mortal.py").write_text(MORTAL)

    def options(num_kills: int) -> tuple[str, ...]:
        monkeypatch.setenv("KILLS", str(num_kills))
        (tmp_path / "killed").unlink(missing_ok=True)
        return ("--handlers", "mortal:Mortal", "--jobs", "2")

    return options


@pytest.fixture
def with_victim(tmp_path: Path) -> Path:
    """A directory of three logs, of which the second has the request."""
    for number, name in enumerate(("chat-17", "victim-1", "chat-18")):
        story = tell_story(name)
        header = {"opened_at_unix_ns": OPENED_AT + number}
        write_segments(tmp_path / "logs" / name, story.observed, story.configuration, header=header)
    return tmp_path / "logs"


def verdicts(result: Any) -> list[tuple[str, str]]:
    """(name of the log, verdict) of each, as JSON says it."""
    names = [Path(str(each["path"])).name for each in result.objects("log")]
    return list(zip(names, [str(each["verdict"]) for each in result.objects("verdict")], strict=True))


def test_a_killed_process_costs_the_other_logs_nothing(run: Any, mortal: Any, with_victim: Path) -> None:
    """Incident: where one process was killed, no log got a verdict, and the exit code was 70."""
    result = run("verify", "--json", *mortal(2), with_victim)
    assert result.exit_code == 7, result.err
    assert verdicts(result) == [("chat-17", "sound"), ("victim-1", "not_verified"), ("chat-18", "sound")]
    assert "victim-1: not verified: its process was killed" in result.err
    text = run("verify", *mortal(2), with_victim)
    assert text.exit_code == 7
    assert "verdict     not verified" in text.out
    assert "logs        3, 2 sound" in text.out


def test_a_log_whose_process_was_killed_once_is_verified_by_another(run: Any, mortal: Any, with_victim: Path) -> None:
    """What is printed is what it would have been."""
    whole = run("verify", "--handlers", "mortal:Mortal", "--jobs", "1", with_victim)
    result = run("verify", *mortal(1), with_victim)
    assert Path("killed").read_text().count("victim-1") > 1
    assert result == whole
    assert result.exit_code == 0


def test_one_log_is_verified_though_a_process_that_had_a_part_was_killed(
    run: Any, sound: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process does alone what they would have done together."""
    log = write_log(tmp_path / "log", sound.observed, sound.configuration)
    whole = run("verify", "--jobs", "1", log)
    killed = Processes(2)
    os.kill(killed.submit(os.getpid).result(), signal.SIGKILL)
    with pytest.raises(BrokenExecutor):
        killed.submit(time.sleep, 3600).result()
    monkeypatch.setattr(verify, "MIN_BYTES", 0)
    monkeypatch.setattr(verify, "processes", lambda _: contextlib.nullcontext(killed))
    assert run("verify", "--jobs", "4", log) == whole
    assert whole.exit_code == 0
    killed.end()
