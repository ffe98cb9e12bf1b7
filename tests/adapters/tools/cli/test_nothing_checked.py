"""A verdict over nothing: every command says that nothing could be checked, and why, and exits with 5.

And a verdict over a part says which part.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lifecycle_driver import Driver, keys_of
from log_torture import reopened
from stored_logs import OPENED_AT, header_of, serve_many, write_log

from kvledger.adapters.tools.cli import verify
from kvledger.adapters.tools.exit_codes import VERDICTS, ExitCode, gravest
from kvledger.adapters.tools.logs import index as index_module
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.snapshots import write_snapshots
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import vocabulary_header
from kvledger.storage.events import SegmentEventStore
from kvledger.storage.events.segment_file import segment_paths

REQUEST = "r90"
COMMANDS = [
    ["verify"],
    ["verify", "--jobs", "2"],
    ["show"],
    ["stats"],
    ["show", "--at", "1000000"],
    ["export", "--perfetto", "-o", "trace.json"],
    ["export", "--html", "-o", "page.html"],
    ["export", "--perfetto"],
    ["tables", "-o", "tables"],
    ["repro", "--core"],
    ["show", REQUEST],
    ["why", REQUEST],
    ["show", REQUEST, "--at", "1000000"],
    ["verify", "--request", REQUEST],
    ["stats", "--request", REQUEST],
    ["export", "--perfetto", "--request", REQUEST],
    ["repro", REQUEST, "--pin", "--core"],
]
WITHOUT_REQUEST = [words for words in COMMANDS if REQUEST not in words]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command writes stays in a folder of the test; also small logs are verified in parts."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(verify, "MIN_BYTES", 0)


@pytest.fixture(scope="module")
def many() -> Driver:
    """Requests r0 to r149, one after the other."""
    return serve_many(150)


@pytest.fixture
def whole(tmp_path: Path, many: Driver) -> Path:
    """Their log, in several segments that have snapshots."""
    log = write_log(tmp_path / "log", many.observed, many.configuration, segment_bytes=16_000)
    write_snapshots(open_log(log))
    assert len(segment_paths(log)) > 2
    return log


@pytest.fixture
def beginless(run: Any, whole: Path) -> Path:
    """The same after its oldest segment was retired, without a snapshot."""
    _, *kept = segment_paths(whole)
    files = [file for segment in kept for file in (segment, segment.with_suffix(".snapshot"))]
    num_bytes = sum(file.stat().st_size for file in files)
    assert run("retire", whole, "--max-bytes", num_bytes).exit_code == 0
    for snapshot in whole.glob("*.snapshot"):
        snapshot.unlink()
    assert int(segment_paths(whole)[0].stem) > 1
    return whole


@pytest.fixture
def empty(tmp_path: Path, many: Driver) -> Path:
    """A log that was closed before an event came."""
    return write_log(tmp_path / "empty", [], many.configuration)


def verdict_of(result: Any) -> dict[str, Any]:
    """The only verdict."""
    (verdict,) = result.objects("verdict")
    return dict(verdict)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_of_a_log_without_its_beginning_and_a_snapshot_nothing_is_checked(
    run: Any, beginless: Path, words: list[str]
) -> None:
    """Incident: two servers on one log_dir left such logs: "42 checked over 0 events, none broken … sound", and 0."""
    result = run(*words[:1], beginless, *words[1:])
    assert result.exit_code == 5, result.out + result.err
    said = result.err if words[0] != "verify" else result.out
    assert "nothing c" in said  # could be checked, can be run again
    assert f"begins with event {int(segment_paths(beginless)[0].stem)}" in said
    assert "sound" not in result.out
    assert "none broken" not in result.out
    assert "no request is known" not in result.out


@pytest.mark.parametrize("words", WITHOUT_REQUEST, ids=" ".join)
def test_of_a_log_without_events_nothing_is_checked(run: Any, empty: Path, words: list[str]) -> None:
    """Its engine ended before a request came."""
    result = run(*words[:1], empty, *words[1:])
    assert result.exit_code == 5, result.out + result.err
    assert "no event" in result.out + result.err
    assert "sound" not in result.out


@pytest.mark.parametrize("words", [words for words in COMMANDS if "--at" not in words], ids=" ".join)
def test_a_selected_part_without_an_event_is_not_judged(run: Any, whole: Path, words: list[str]) -> None:
    """By number, which only the end of the log refutes, and by time."""
    for since in ("999999", "3h"):
        result = run(*words[:1], whole, *words[1:], "--since", since)
        assert result.exit_code == 5, (since, result.out + result.err)
        assert "sound" not in result.out


def test_the_words_and_the_json_of_a_verdict_over_nothing(run: Any, beginless: Path) -> None:
    """No rule is counted, and no event."""
    text = run("verify", beginless).out
    assert text.endswith("verdict     nothing could be checked\n")
    assert "rules       not checked\n" in text
    assert "decisions   not repeated\n" in text
    verdict = verdict_of(run("verify", "--json", beginless))
    assert (verdict["verdict"], verdict["exit_code"]) == ("nothing_checked", 5)
    assert (verdict["first_event_checked"], verdict["last_event_checked"], verdict["num_events_checked"]) == (
        None,
        None,
        0,
    )
    assert any("no usable snapshot holds the state before it" in remark for remark in verdict["remarks"])
    page = html.unescape(run("export", "--html", beginless).out)
    assert "nothing could be checked" in page
    assert "every rule that a log can decide is kept" not in page
    assert "every decision was repeated" not in page


def test_show_and_ls_do_not_count_what_cannot_be_read(run: Any, beginless: Path, empty: Path) -> None:
    """Incident: both said "0 requests"."""
    shown = run("show", beginless)
    assert "not known: the log begins with event" in shown.out
    (log,) = run("show", "--json", beginless).objects("log")
    assert log["figures"] is None
    assert "begins with event" in str(log["nothing_checked"])
    for path, words in ((beginless, "beginning missing, closed"), (empty, "no event, closed")):
        listed = run("ls", path)
        assert listed.exit_code == 5
        assert words in listed.out
        (record,) = run("ls", "--json", path).objects("log_listed")
        assert record["num_requests"] is None


def test_an_index_does_not_make_something_of_nothing(
    run: Any, beginless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a log that is too large to be read each time."""
    monkeypatch.setattr(index_module, "INDEX_FROM_BYTES", 0)
    for _ in range(2):
        assert run("show", beginless).exit_code == 5
        assert run("why", beginless, REQUEST).exit_code == 5
        assert run("show", beginless, REQUEST).exit_code == 5


def test_an_empty_log_that_is_being_written_holds_no_event_yet(run: Any, tmp_path: Path, many: Driver) -> None:
    """An engine that has just started."""
    store = SegmentEventStore.create(tmp_path / "log", header_of(many.configuration))
    result = run("verify", tmp_path / "log")
    store.close()
    assert result.exit_code == 5
    assert "the log holds no event yet" in result.out


def test_a_later_segment_alone_is_not_judged(run: Any, whole: Path) -> None:
    """Its chain and its events are read; what came before is in another file."""
    result = run("verify", segment_paths(whole)[1])
    assert result.exit_code == 5
    assert "verdict     nothing could be checked" in result.out


def test_a_log_that_begins_with_a_snapshot_is_judged_from_there_and_says_so(run: Any, whole: Path) -> None:
    """What was retired was judged by nobody here."""
    num_bytes = sum(file.stat().st_size for file in segment_paths(whole)[1:])
    assert run("retire", whole, "--max-bytes", num_bytes).exit_code == 0
    first = int(segment_paths(whole)[0].stem)
    last = verdict_of(run("verify", "--json", whole))["num_events"] + first - 1
    for jobs in ("1", "2"):
        result = run("verify", whole, "--jobs", jobs)
        assert result.exit_code == 0
        assert result.out.endswith(f"verdict     sound; only events {first}–{last} were checked\n")
    until = run("verify", whole, "--until", first - 1)
    assert until.exit_code == 5
    assert run("show", whole, "--at", first - 1).exit_code == 5
    assert run("show", whole, "--at", first + 9).exit_code == 0
    assert run("show", whole).exit_code == run("stats", whole).exit_code == run("ls", whole).exit_code == 0


def test_a_part_behind_a_gap_is_not_judged(run: Any, whole: Path) -> None:
    """Incident: a selection behind damage was sound, since the damage was not part of it."""
    segment = segment_paths(whole)[1]
    behind = int(segment_paths(whole)[2].stem)
    segment.unlink()
    result = run("verify", whole, "--since", behind + 5)
    assert result.exit_code == 5
    assert "events after event" in result.out
    before = run("verify", whole, "--until", 20)
    assert before.exit_code == 0
    assert "; only events 1–20 were checked" in before.out
    damaged = run("verify", whole)
    assert damaged.exit_code == 2
    assert f"verdict     damaged; only events 1–{int(segment.stem) - 1} were checked" in damaged.out


@pytest.mark.parametrize("jobs", ["1", "4"])
def test_a_part_without_an_event_of_the_request_is_not_judged_for_it(run: Any, whole: Path, jobs: str) -> None:
    """The request ended before; of its own part it is judged, and the verdict says so."""
    own = [group["first_sequence"] for group in run("show", "--json", whole, "r3").objects("group")]
    gone = run("verify", whole, "--request", "r3", "--since", 400, "--jobs", jobs)
    assert gone.exit_code == 5
    assert "r3 has no event in events 400–" in gone.out
    its = run("verify", whole, "--request", "r3", "--since", own[0], "--until", own[0] + 3, "--jobs", jobs)
    assert its.exit_code == 0
    assert f"only events {own[0]}–{own[0] + 3} of r3 were checked" in its.out


def test_steps_between_its_own_events_are_a_requests_life(run: Any, tmp_path: Path) -> None:
    """A request that only decodes is named by no event."""
    driver = Driver(num_slots=64)
    driver.start("a", keys_of("a", 2), 20, (1, 2))
    driver.settle_all()
    first = len(driver.observed) + 1
    for _ in range(6):
        driver.step()
    last = len(driver.observed)
    driver.finish("a", 26, 27)
    driver.settle_all()
    log = write_log(tmp_path / "decoding", driver.observed, driver.configuration)
    result = run("verify", log, "--request", "a", "--since", first, "--until", last)
    assert result.exit_code == 0, result.out


def test_a_log_damaged_all_through_is_damaged_and_nothing_was_checked(run: Any, tmp_path: Path, many: Driver) -> None:
    """Its header is intact, and no event is."""
    log = write_log(tmp_path / "torn", many.observed[:1], many.configuration)
    (segment,) = segment_paths(log)
    segment.write_bytes(segment.read_bytes()[:-3])
    result = run("verify", log)
    assert result.exit_code == 2
    assert "damaged, and nothing could be checked" in result.out
    for words in (["show"], ["stats"], ["show", "--at", "9"], ["export", "--perfetto"], ["repro", "--core"]):
        assert run(words[0], log, *words[1:]).exit_code == 2, words


def test_of_several_logs_each_has_its_verdict(run: Any, tmp_path: Path, many: Driver) -> None:
    """One sound, one without an event; a time that one of them does not have costs the other nothing."""
    write_log(tmp_path / "logs/a", many.observed, many.configuration, header={"opened_at_unix_ns": OPENED_AT})
    write_log(tmp_path / "logs/b", [], many.configuration, header={"opened_at_unix_ns": OPENED_AT + 1})
    for jobs in ("1", "2"):
        result = run("verify", tmp_path / "logs", "--jobs", jobs)
        assert result.exit_code == 5
        assert "logs        2, 1 sound, 1 without anything to check" in result.out
    for words in (["show"], ["stats"], ["ls"], ["export", "--perfetto"]):
        assert run(words[0], tmp_path / "logs", *words[1:]).exit_code == 5
    since = run("verify", tmp_path / "logs", "--since", "0.1ms", "--json")
    assert since.exit_code == 5
    assert [each["verdict"] for each in since.objects("verdict")] == ["sound"]
    assert len(since.objects("nothing_checked")) == 1


def test_the_verdict_on_a_workers_log_says_that_it_covers_its_calls(run: Any, tmp_path: Path, many: Driver) -> None:
    """Requests are in the scheduler's log."""
    header = {"engine_id": "an-id", "worker_rank": 0, "connector": "Mine"}
    note = [e.LogNote("a worker says something", 10)]
    log = write_log(tmp_path / "worker", note, many.configuration, header=header)
    write_log(
        tmp_path / "scheduler", many.observed, many.configuration, header={"engine_id": "an-id", "connector": "Mine"}
    )
    result = run("verify", log)
    assert result.exit_code == 0
    assert "verdict     sound; only the calls of worker 0 were checked" in result.out
    assert "none in a worker's log" in run("show", log).out
    (listed,) = run("ls", "--json", log).objects("log_listed")
    assert listed["num_requests"] is None


def test_a_workers_log_alone_is_not_called_sound(run: Any, tmp_path: Path, many: Driver) -> None:
    """A start that failed before its scheduler was made left only this one; without any request the code was 0."""
    header = {"engine_id": "an-id", "worker_rank": 0, "connector": "Mine"}
    log = write_log(tmp_path / "logs" / "worker", [e.LogNote("a note", 10)], many.configuration, header=header)
    for given in (log, log.parent):
        for options in ([], ["--jobs", "2"]):
            result = run("verify", given, *options)
            assert result.exit_code == 5
            assert "verdict     nothing could be checked except the calls of worker 0" in result.out
            remark = "the log of this engine's scheduler, which has the requests, is not in the same directory"
            assert remark in result.out
    (verdict,) = run("verify", log, "--json").objects("verdict")
    assert verdict["verdict"] == "nothing_checked"


def test_a_verdict_without_the_events_that_were_skipped_is_none(run: Any, tmp_path: Path, story: Driver) -> None:
    """What follows from an event of a newer version is not known, so "sound" would be too much."""
    vocabulary = vocabulary_header(Core.standard())["vocabulary"]
    assert isinstance(vocabulary, list)
    newer = [*vocabulary, {"id": "request.priority_changed", "version": 1, "fields": ["request_id", "priority"]}]
    log = write_log(tmp_path / "log", story.observed, story.configuration, header={"vocabulary": newer})
    assert run("verify", "--lenient", log).exit_code == 0
    store = reopened(log)
    store.append(b"\x91" + msgspec.msgpack.encode([len(vocabulary), "chat-17-b6", 3]), 1)
    store.close()
    result = run("verify", "--lenient", log)
    assert result.exit_code == 7
    assert "verdict     not verified: events that this version does not know were skipped; only events 1–" in result.out


def test_codes_go_by_their_gravity() -> None:
    """The table of the design; what is no verdict goes over all of them."""
    order = [2, 1, 3, 7, 5, 4, 6, 0]
    assert [int(code) for code in VERDICTS] == order
    for at, code in enumerate(order):
        assert gravest(ExitCode(each) for each in reversed(order[at:])) == code
    assert gravest([ExitCode.DAMAGED, ExitCode.INTERNAL_ERROR]) == ExitCode.INTERNAL_ERROR
