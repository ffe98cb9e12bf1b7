"""`kvledger export` as a command: where it writes, what it refuses, and what it leaves behind when it cannot."""

from __future__ import annotations

import html
import json
import os
import re
import resource
import stat
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lifecycle_driver import Driver
from processes import finished
from stored_logs import header_of, serve_many, unfoldable, write_log
from trace_importer import read_trace

from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events, vocabulary_header
from kvledger.storage.events import SegmentEventStore
from kvledger.storage.events.segment_file import read_header

FORMATS = ["--perfetto", "--html"]


@pytest.mark.parametrize("form", FORMATS)
def test_without_a_file_it_writes_to_stdout(log: Path, form: str) -> None:
    """For pipes; a word about the log goes to stderr."""
    command = [sys.executable, "-m", "kvledger.adapters.tools.cli.main", "export", str(log), form]
    result = finished(command)
    assert result.returncode == 0, result.stderr
    assert result.stdout[:1] in {"{", "<", "l"}
    assert result.stderr == ""


@pytest.mark.parametrize("form", ["--perfetto", "--html"])
def test_a_terminal_gets_no_page_and_no_trace(run: Any, log: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be thousands of lines of markup."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    result = run("export", log, form)
    assert result.exit_code == ExitCode.USAGE
    assert "name a file with -o" in result.err


@pytest.mark.parametrize("form", FORMATS)
def test_an_existing_file_is_replaced_only_by_force(run: Any, log: Path, tmp_path: Path, form: str) -> None:
    """Nothing is lost by a slip."""
    path = tmp_path / "out"
    path.write_text("precious")
    refused = run("export", log, form, "-o", path)
    assert refused.exit_code == ExitCode.USAGE
    assert "--force" in refused.err
    assert path.read_text() == "precious"
    assert run("export", log, form, "-o", path, "--force").exit_code == 0
    assert path.read_text() != "precious"


def test_what_cannot_be_finished_leaves_nothing_behind(run: Any, log: Path, tmp_path: Path) -> None:
    """A full disk: the old file stays as it was, no part of a new one appears."""
    path = tmp_path / "out.json"
    path.write_text("precious")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        result = run("export", log, "--perfetto", "-o", path, "--force")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == ExitCode.USAGE
    assert "cannot be written" in result.err
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["out.json"]
    assert path.read_text() == "precious"


def test_a_file_has_the_rights_that_any_new_file_has(run: Any, log: Path, tmp_path: Path) -> None:
    """Not those of a temporary one, which only its owner may read."""
    before = os.umask(0o027)
    try:
        assert run("export", log, "--html", "-o", tmp_path / "page.html").exit_code == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([], "give exactly one format"),
        (["page.html", "--html"], "was parsed as the REQUEST; to write a file of this name, give -o page.html"),
        (["--perfetto", "--html"], "give exactly one format: --perfetto"),
        (["--perfetto", "--json"], "name a file with -o"),
        (["--perfetto", "-o", "no/such/folder/t.json"], "No such file or directory"),
        (["--perfetto", "-o", "."], "is a folder"),
        (["--html", "--request", "nobody"], "no request has 'nobody' in its id"),
    ],
)
def test_wrong_usage_is_named(run: Any, log: Path, options: list[str], complaint: str) -> None:
    """With what is wrong and how it is right."""
    result = run("export", log, *options)
    assert result.exit_code == ExitCode.USAGE
    assert complaint in result.err


def changed(story: Driver, event_class: type[e.Event], **fields: object) -> list[e.Event]:
    """The story's events with fields of the first one of a class replaced."""
    events = list(story.observed)
    place = next(at for at, event in enumerate(events) if type(event) is event_class)
    events[place] = msgspec.structs.replace(events[place], **fields)
    return events


@pytest.mark.usefixtures("failing_fold")
@pytest.mark.parametrize("form", FORMATS)
def test_a_log_that_cannot_be_folded_is_exported_whole(run: Any, story: Driver, tmp_path: Path, form: str) -> None:
    """An export needs nothing of what decides. The page names the event at which its verdict ends."""
    log = write_log(tmp_path / "alien", unfoldable(story.observed), story.configuration)
    path = tmp_path / "out"
    result = run("export", log, form, "-o", path)
    assert result.exit_code == 0
    assert "cannot be folded" not in result.err
    assert "chat-17-b6" in path.read_text()
    assert "chat-9" in path.read_text(), "the last request of the log"
    if form == "--perfetto":
        assert json.loads(path.read_text())["traceEvents"]  # Perfetto itself refuses an id that is used twice
    if form == "--html":
        assert "cannot be folded" in path.read_text()


def test_the_page_of_a_log_that_is_decided_otherwise_today_says_so(run: Any, story: Driver, tmp_path: Path) -> None:
    """With what was recorded and what would be decided; any free slot will do, but it would take others."""
    events = changed(story, e.SaveIssued, slots=(8, 9, 10))
    del events[next(at for at, event in enumerate(events, 1) if type(event) is e.SaveIssued) :]
    log, path = write_log(tmp_path / "other", events, story.configuration), tmp_path / "page.html"
    assert run("export", log, "--html", "-o", path).exit_code == 0
    page = html.unescape(path.read_text())
    assert "today's code decides differently" in page
    assert re.search(r"save.issued: slots is [\[(]8, 9, 10[^<]* in the log and [\[(]0, 1, 2[^<]* when decided", page)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("events", [[], [e.LogNote("connector started", 5)]])
def test_a_log_in_which_nothing_happened_is_exported_too(
    run: Any, story: Driver, tmp_path: Path, form: str, events: list[e.Event]
) -> None:
    """A process that was killed at once leaves one."""
    log, path = write_log(tmp_path / "log", events, story.configuration), tmp_path / "out"
    result = run("export", log, form, "-o", path)
    assert (result.exit_code, result.err.count("\n")) == ((0, 1) if events else (5, 2))
    if form == "--perfetto":
        assert not read_trace(path).slices


@pytest.mark.parametrize("form", FORMATS)
def test_events_of_a_newer_version_are_left_out_and_counted(run: Any, story: Driver, tmp_path: Path, form: str) -> None:
    """With --lenient; without it the log is refused and nothing is written."""
    vocabulary = vocabulary_header(Core.standard())["vocabulary"]
    assert isinstance(vocabulary, list)
    newer = [*vocabulary, {"id": "request.priority_changed", "version": 1, "fields": ["request_id", "priority"]}]
    store = SegmentEventStore.create(tmp_path / "log", header_of(story.configuration, {"vocabulary": newer}))
    unknown = msgspec.msgpack.encode([len(vocabulary), "chat-17-b6", 3])
    for number, event in enumerate(story.observed):
        encoded = encode_events([event])
        payload, count = (b"\x92" + encoded[1:] + unknown, 2) if number == 10 else (encoded, 1)
        store.append(payload, count)
    store.close()
    path = tmp_path / "out"
    assert run("export", tmp_path / "log", form, "-o", path).exit_code == 2
    assert not path.exists()
    result = run("export", tmp_path / "log", form, "-o", path, "--lenient")
    assert result.exit_code == 0
    assert "1 event of the kind request.priority_changed" in result.err
    assert "chat-17-b6" in path.read_text()


def test_a_log_that_is_still_written_is_exported_as_far_as_it_is(run: Any, story: Driver, tmp_path: Path) -> None:
    """The writer is neither disturbed nor waited for."""
    store = SegmentEventStore.create(tmp_path / "log", header_of(story.configuration))
    store.append(encode_events(story.observed[:20]), 20)
    first = tmp_path / "first.json"
    assert run("export", tmp_path / "log", "--perfetto", "-o", first).exit_code == 0
    store.append(encode_events(story.observed[20:]), len(story.observed) - 20)
    second = tmp_path / "second.json"
    assert run("export", tmp_path / "log", "--perfetto", "-o", second).exit_code == 0
    store.close()
    last_events = [json.loads(path.read_text())["otherData"]["logs"][0]["last_event"] for path in (first, second)]
    assert last_events == [20, len(story.observed)]


def test_json_tells_what_was_written(run: Any, log: Path, tmp_path: Path) -> None:
    """For scripts."""
    path = tmp_path / "trace.json"
    (written,) = run("export", log, "--perfetto", "-o", path, "--json").objects("export")
    assert written == {"type": "export", "path": str(path), "num_bytes": path.stat().st_size, "num_logs": 1}


def test_a_trace_of_a_long_log_is_written_in_little_memory(tmp_path: Path) -> None:
    """Ten times the log takes about the memory of one."""
    peaks = []
    for num_requests in (300, 3000):
        driver = serve_many(num_requests)
        log = write_log(tmp_path / f"log{num_requests}", driver.observed, driver.configuration, segment_bytes=1 << 17)
        script = (
            "import pathlib, re, sys; from kvledger.adapters.tools.cli.main import main; "
            f"code = main(['export', {str(log)!r}, '--perfetto', '-o', {str(tmp_path / f't{num_requests}.json')!r}]); "
            # The peak of this process alone: what getrusage tells is inherited from the one that started it.
            r"print(re.search(r'VmHWM:\s+(\d+)', pathlib.Path('/proc/self/status').read_text())[1]); sys.exit(code)"
        )
        result = finished([sys.executable, "-c", script])
        assert result.returncode == 0, result.stderr
        peaks.append(int(result.stdout.splitlines()[-1]))
    assert json.loads((tmp_path / "t3000.json").read_bytes())["traceEvents"]
    assert peaks[1] - peaks[0] < 3_000, f"KiB at the peak: {peaks}"


def test_a_log_without_its_header_does_not_keep_others_from_a_page(run: Any, story: Any, tmp_path: Path) -> None:
    """It is named, and costs the exit code; alone it is refused."""
    for name in ("sound", "headless"):
        write_log(tmp_path / "logs" / name, story.observed, story.configuration)
    for segment in (tmp_path / "logs" / "headless").glob("*.kvlog"):
        num_bytes = read_header(segment).num_bytes
        segment.write_bytes(bytes(num_bytes) + segment.read_bytes()[num_bytes:])
    page = tmp_path / "page.html"
    of_both = run("export", tmp_path / "logs", "--html", "-o", page)
    assert of_both.exit_code == ExitCode.DAMAGED
    assert "headless" in of_both.err
    assert "<title>kvledger · sound</title>" in page.read_text()
    alone = run("export", tmp_path / "logs" / "headless", "--html", "-o", page, "--force")
    assert alone.exit_code == ExitCode.DAMAGED
