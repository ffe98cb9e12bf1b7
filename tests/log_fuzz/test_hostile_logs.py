"""What a hostile log holds is data to every command: it is not obeyed, not imported, not followed."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import sqlite3
import sys
import unicodedata
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import attrs
import pytest
from pyarrow import parquet

from kvledger.adapters.recorded.extension import Recorder
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.logs import index as index_module
from kvledger.storage.events.segment_file import segment_paths
from log_fuzz.commands import LINES, Line, lines
from log_fuzz.mutations import put, texts_of
from log_fuzz.planted import story_log
from log_fuzz.seeds import Log, told

pytestmark = pytest.mark.xdist_group("log_fuzz")

_TEXTS = (
    "chat-9",  # so that a request is found by a part of its id
    '=HYPERLINK("http://evil.example")',
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{7*7}}{% raw %}${7*7}",
    "\x1b]0;owned\x07\x9b31m\r\n",
    "../../../etc/passwd",
    "'); import os; os.abort() #",
    "javascript:alert(1)",
    "\u202e\u2066\ufeff\u200b\u2028",
    "%s%n{0}{x!r}[bold]",
    "\x00nul",
    "]]>&lt;!--",
    "\U000e0041tag",
    "`id`$(id)",
)
HOSTILE = "|".join(_TEXTS)
UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
KEPT_TEXTS = {"schema_version", "vocabulary", "configuration", "extensions"}
"""Parts of the header without which nothing would be read."""


@attrs.frozen
class Result:
    """What a command printed and returned."""

    exit_code: int
    output: str


@attrs.frozen
class Reader:
    """Runs commands in this process."""

    capsys: pytest.CaptureFixture[str]
    places: dict[str, str | Path]

    def __call__(self, line: Line, **places: str | Path) -> Result:
        """Run one command."""
        self.capsys.readouterr()
        exit_code = main(line.arguments({**self.places, **places}))
        captured = self.capsys.readouterr()
        return Result(exit_code, captured.out + captured.err)


@pytest.fixture
def read(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Reader:
    """A reader with a sound log to compare with, and a folder for what it writes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KVLEDGER_LOG", raising=False)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    other = story_log(tmp_path / "other")
    return Reader(capsys, {"OTHER": other, "DIR": tmp_path / "logs", "OUT": out, "REQUEST": "chat-9"})


def named(name: str) -> Log:
    """One of the logs that are made without vLLM."""
    return next(copy.deepcopy(log) for log in told() if log.name == name)


def hostile(log: Log) -> Log:
    """The log with this in every text of its events, its payloads and its header."""
    for path, text in texts_of(log):
        is_kept = path[1] in KEPT_TEXTS if path[0] == "header" else text == "recorder" or text in Recorder.events
        if not is_kept:
            put(log, path, HOSTILE)
    log.header |= {"connector": HOSTILE, "model": HOSTILE, "handler_fingerprint": f"{HOSTILE}={HOSTILE}"}
    return log


class Page(HTMLParser):
    """The tags and attributes of a page, and all of its text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.links: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Keep it."""
        self.tags.append((tag, tuple(sorted(name for name, _ in attributes))))
        self.links |= {value or "" for name, value in attributes if name in {"href", "src", "action", "style"}}

    def handle_data(self, data: str) -> None:
        """Keep it."""
        self.text += data


def unseen_in(text: str) -> set[str]:
    """What in the text cannot be seen, but for the ends of its lines."""
    return {character for character in text if unicodedata.category(character) in UNSEEN} - {"\n"}


@pytest.mark.parametrize("name", ["one event of each class", "recorder"])
@pytest.mark.parametrize("command", LINES)
def test_hostile_texts_in_every_field_reach_no_terminal_unescaped(
    read: Reader, command: str, name: str, tmp_path: Path
) -> None:
    """In every command, of every event, of the recorder's payloads, and of the header."""
    log = hostile(named(name)).write(tmp_path / "logs" / "log")
    for line in lines():
        if line.command != command:
            continue
        result = read(line, LOG=log)
        assert result.exit_code in line.exit_codes, f"{line}: {result}"
        assert not unseen_in(result.output), line
        if "--json" in line.rest:
            for each in filter(lambda each: each.startswith("{"), result.output.splitlines()):
                json.loads(each)


@pytest.mark.parametrize("name", ["one event of each class", "recorder"])
def test_hostile_texts_become_no_tag_no_link_and_no_template(read: Reader, name: str, tmp_path: Path) -> None:
    """The page has the tags that it has for a harmless log, and shows what a template would have replaced."""
    line = next(each for each in lines() if "--html" in each.rest)
    pages = []
    for number, log in enumerate((named(name), hostile(named(name)))):
        assert read(line, LOG=log.write(tmp_path / "logs" / str(number))).exit_code == 0
        pages.append(Page((tmp_path / "out" / "page.html").read_text()))
    harmless, page = pages
    tags, before = ([tag for tag, _ in each.tags] for each in (page, harmless))
    assert set(tags) <= {*before, "code"}
    assert tags.count("script") == before.count("script")
    assert {name for _, names in page.tags for name in names} <= {name for _, names in harmless.tags for name in names}
    assert all(link.startswith("#") for link in page.links - harmless.links)
    assert "{{7*7}}" in page.text
    assert not unseen_in(page.text)


def test_hostile_texts_leave_files_for_programs_whole(read: Reader, tmp_path: Path) -> None:
    """Traces, spans and tables are read back by parsers, with the texts as they were."""
    log = hostile(named("recorder")).write(tmp_path / "logs" / "log")
    for line in lines():
        if line.command in {"export", "tables"}:
            assert read(line, LOG=log).exit_code == 0
    out = tmp_path / "out"
    json.loads((out / "trace.json").read_text())
    assert all(map(json.loads, (out / "spans.jsonl").read_text().strip().split("\n")))
    ids = parquet.read_table(out / "tables" / "requests.parquet")["request_id"].to_pylist()
    assert any(HOSTILE in request_id for request_id in ids)


PLANTED = "kvledger_planted_module"


@pytest.mark.parametrize("command", LINES)
def test_what_a_header_names_is_not_imported(
    read: Reader, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers, extensions and a recorded connector, of a module that lies in the working directory."""
    place = f"{PLANTED}:Planted"
    (tmp_path / f"{PLANTED}.py").write_text("from pathlib import Path\nPath('imported').touch()\nclass Planted: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    log = named("recorder")
    declared = {"version": 1, "made_by": place, "events": [], "rows": [], "hooks": [["running", "step_scheduled"]]}
    log.header |= {
        "handler_fingerprint": f"running={place}",
        "extensions": [*log.header["extensions"], {"name": PLANTED, **declared}, {"name": place, **declared}],
        "code": {PLANTED: "1", place: "1"},
        "connector": place,
    }
    for path, text in texts_of(log):
        if text in {"KVLedgerRecorder", "OffloadingConnector"}:
            put(log, path, place)
    stored = log.write(tmp_path / "logs" / "log")
    for line in lines():
        if line.command == command:
            result = read(line, LOG=stored)
            assert result.exit_code in line.exit_codes, f"{line}: {result}"
    assert not (tmp_path / "imported").exists()
    assert PLANTED not in sys.modules


def test_a_snapshot_that_somebody_planted_in_a_whole_log_changes_no_answer(read: Reader, tmp_path: Path) -> None:
    """It is right in its form and says something else: a log that has its beginning is read from there."""
    log = told()[1]
    shortened = next(each for each in told() if each.name == "story without its beginning").write(tmp_path / "short")
    snapshot = next(shortened.glob("*.snapshot"))
    every = [line for line in lines() if line.command not in {"export", "repro", "ls", "retire"}]
    stored = log.write(tmp_path / "logs" / "log")
    before = [read(line, LOG=stored) for line in every]
    shutil.copy(snapshot, stored / "00000000000000000001.snapshot")
    assert [read(line, LOG=stored) for line in every] == before


def _cells(path: Path) -> Iterator[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for row in connection.execute(f"PRAGMA table_info({table})").fetchall():
                yield table, row[1]


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.long)], ids=["some commands", "all"])
@pytest.mark.parametrize(
    "planted",
    [
        b"\x91" * 100_000,
        "../../../etc/passwd",
        *(pytest.param(each, marks=pytest.mark.long) for each in (b"\x90", -1, 1 << 62, 1.5)),
    ],
    ids=lambda each: repr(each)[:20],
)
def test_an_index_that_somebody_planted_does_no_harm(
    read: Reader, planted: Any, share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each column in turn says something else in all rows: every command ends as it says, and reads no other file."""
    monkeypatch.setattr(index_module, "INDEX_FROM_BYTES", 0)
    log = story_log(tmp_path / "logs" / "log")
    show = [line for line in lines() if line.command in {"show", "why", "stats"}]
    for line in show:
        read(line, LOG=log)
    (path,) = (tmp_path / "cache").rglob("*.sqlite")
    sound = path.read_bytes()
    for number, (table, column) in enumerate(_cells(path)):
        path.write_bytes(sound)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            try:
                connection.execute(f"UPDATE OR REPLACE {table} SET {column} = ?", (planted,))  # noqa: S608 -- ours
            except sqlite3.Error:
                continue  # of another type than a key may have
        for line in show[number % share :: share]:
            result = read(line, LOG=log)
            assert result.exit_code in line.exit_codes, f"{table}.{column}: {line}: {result}"
            assert "root:" not in result.output


def test_what_a_link_in_the_place_of_a_segment_leads_to_is_not_shown(read: Reader, tmp_path: Path) -> None:
    """A text, and a segment of a log elsewhere."""
    secret = tmp_path / "secret.txt"
    secret.write_text("SECRET-TEXT\n" * 1000)
    elsewhere = segment_paths(named("story").write(tmp_path / "elsewhere"))[0]
    for number, target in enumerate((secret, elsewhere)):
        log = tmp_path / "logs" / str(number)
        log.mkdir(parents=True)
        (log / "00000000000000000001.kvlog").symlink_to(target)
        content = target.read_bytes()
        for line in lines():
            if "--follow" in line.rest:
                continue
            result = read(line, LOG=log)
            assert result.exit_code in line.exit_codes, f"{line}: {result}"
            assert "SECRET-TEXT" not in result.output
            assert target.read_bytes() == content


@pytest.mark.parametrize("line", [line for line in lines() if " -o " in line.rest], ids=str)
def test_an_output_replaces_a_link_and_does_not_follow_it(read: Reader, line: Line, tmp_path: Path) -> None:
    """Also with --force: the file that the link leads to stays as it is."""
    broken = named("story")
    broken.frames.insert(3, copy.deepcopy(broken.frames[2]))
    broken.__attrs_post_init__()
    log = broken.write(tmp_path / "logs" / "log")
    assert read(line, LOG=log).exit_code == 0
    out = tmp_path / "out"
    written = [path for path in out.rglob("*") if path.is_file()]
    victim = tmp_path / "victim"
    for path in written:
        victim.write_text("precious")
        path.unlink()
        path.symlink_to(victim)
    assert written
    read(line, LOG=log)
    assert victim.read_text() == "precious"
