"""No file of a log directory is followed through a link, opened if it is no regular file, or waited for.

A security review found that a link in a log directory let `retire` and `snapshot` overwrite what it led to, that a
linked directory let `retire` delete a log elsewhere, and that a pipe in the place of `writer.lock` hung `verify`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver
from log_torture import reopened
from planted_files import FOREIGN, KINDS, plant
from stored_logs import write_log

from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.snapshots import write_snapshots
from kvledger.lifecycle import LedgerConfiguration
from kvledger.lifecycle import events as e

READING = ("verify", "show", "ls", "stats", "why")
VERDICTS = {0, 2, 4, 5}
ARGUMENTS = {"retire": ("--max-bytes", "1"), "why": ("chat-17",)}

pytestmark = pytest.mark.timeout(300)  # ends what waits for a pipe


@pytest.fixture
def long_log(story: Driver, tmp_path: Path) -> Path:
    """A log of several segments."""
    log = write_log(tmp_path / "logs" / "log", story.observed, story.configuration, segment_bytes=9_500)
    assert len(list(log.glob("*.kvlog"))) > 2
    return log


def _places(log: Path) -> dict[str, Path]:
    segments = sorted(log.glob("*.kvlog"))
    return {
        "writer.lock": log / "writer.lock",
        "retired.jsonl": log / "retired.jsonl",
        "log.end": log / "log.end",
        "first segment": segments[0],
        "second segment": segments[1],
        "last segment": segments[-1],
        "snapshot": segments[1].with_suffix(".snapshot"),
        "unfinished snapshot": segments[1].with_suffix(f".snapshot.{os.getpid()}.unfinished"),
        "unfinished segment": segments[1].with_suffix(".unfinished"),
    }


PLACES = (
    "writer.lock",
    "retired.jsonl",
    "log.end",
    "first segment",
    "second segment",
    "last segment",
    "snapshot",
    "unfinished snapshot",
    "unfinished segment",
)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        pytest.param(place, kind, marks=[pytest.mark.long] if (row + column) % 3 else [])
        for row, place in enumerate(PLACES)
        for column, kind in enumerate(KINDS)
    ],
)
def test_no_command_follows_or_opens_what_is_no_file_of_a_log(
    run: Any, long_log: Path, tmp_path: Path, place: str, kind: str
) -> None:
    """Each command ends with a verdict; the foreign file stays as it is."""
    planted = plant(_places(long_log)[place], kind, tmp_path / "victim")
    for command in (*READING, "retire"):
        for path in (long_log, long_log.parent):
            result = run(command, path, *ARGUMENTS.get(command, ()))
            assert result.exit_code in VERDICTS, (command, path, result.err)
            planted.check_untouched()
            assert "precious" not in result.out + result.err


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("place", ["writer.lock", "retired.jsonl"])
def test_retire_names_what_it_refuses_to_write_and_deletes_nothing(
    run: Any, long_log: Path, tmp_path: Path, place: str, kind: str
) -> None:
    """The file, the reason and the remedy; also for one log among others, which are retired."""
    path = _places(long_log)[place]
    other = shutil.copytree(long_log, long_log.parent / "other")
    planted = plant(path, kind, tmp_path / "victim")
    before = sorted(each.name for each in long_log.glob("*.kvlog"))
    for asked in (long_log, long_log.parent):
        result = run("retire", asked, "--max-bytes", "1")
        assert result.exit_code == 2
        (line,) = [text for text in result.err.splitlines() if str(path) in text]
        assert line.startswith(f"kvledger: {path}: is a")
        assert "; " in line
        assert sorted(each.name for each in long_log.glob("*.kvlog")) == before
        planted.check_untouched()
    assert not other.exists() or len(list(other.glob("*.kvlog"))) == 1


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_segment_that_is_no_regular_file_is_unreadable_and_named(
    run: Any, long_log: Path, tmp_path: Path, kind: str
) -> None:
    """The file, the reason and the remedy."""
    segment = plant(_places(long_log)["second segment"], kind, tmp_path / "victim").path
    for command in ("verify", "show", "ls", "stats", "retire"):
        result = run(command, long_log, *ARGUMENTS.get(command, ()))
        assert result.exit_code == 2, command
        assert f"{segment}: is a " in result.err
        assert "; remove " in result.err


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_log_that_was_not_closed_and_whose_lock_is_no_file_is_not_called_cut_off(
    run: Any, story: Driver, tmp_path: Path, kind: str
) -> None:
    """Whether a process writes it is not known; a closed log is closed all the same."""
    log = write_log(tmp_path / "log", story.observed, story.configuration)
    store = reopened(log)
    killed = Path(shutil.copytree(log, tmp_path / "killed"))
    store.close()
    for path, end in ((log, "closed"), (killed, "cut_off")):
        assert run("ls", path, "--json").objects("log_listed")[0]["end"] == end
    for path, end, name in ((log, "closed", ""), (killed, "unknown", "writer.lock"), (log, "unknown", "log.end")):
        planted = plant(path / (name or "writer.lock"), kind, tmp_path / "victim")
        (listed,) = run("ls", path, "--json").objects("log_listed")
        assert listed["end"] == end
        assert (f"{path / name}: is a " in str(listed["detail"])) is bool(name)
        planted.check_untouched()


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_record_of_what_was_retired_is_named_where_it_is_needed_and_is_no_file(
    run: Any, long_log: Path, tmp_path: Path, kind: str
) -> None:
    """Of a log without its beginning. In a directory of logs such a record costs the logs nothing."""
    assert run("retire", long_log, "--max-bytes", "1").exit_code == 0
    planted = plant(long_log / "retired.jsonl", kind, tmp_path / "victim")
    result = run("verify", long_log)
    assert result.exit_code == 2
    assert f"{planted.path}: is a " in result.err
    planted.check_untouched()
    shutil.rmtree(long_log)
    write_log(long_log.parent / "other", [e.LogNote("a note", 1)], LedgerConfiguration(16, 16, 8))
    planted = plant(long_log.parent / "retired.jsonl", kind, tmp_path / "victim")
    result = run("verify", long_log.parent)
    assert result.exit_code == 0
    assert f"{planted.path}: is a " in result.err
    planted.check_untouched()


def test_a_planted_snapshot_is_replaced_by_a_real_one(long_log: Path, tmp_path: Path) -> None:
    """A link counts as no snapshot, and the foreign file stays."""
    planted = plant(_places(long_log)["snapshot"], "link", tmp_path / "victim")
    write_snapshots(open_log(long_log))
    planted.check_untouched()
    assert not planted.path.is_symlink()
    assert planted.path.read_bytes().startswith(b"KVLEDGERSNAP")


@pytest.fixture
def elsewhere(story: Driver, tmp_path: Path) -> Path:
    """A log that is in no directory that is given to a command."""
    return write_log(tmp_path / "mine" / "log", story.observed, story.configuration, segment_bytes=9_500)


def _content(log: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in log.iterdir()}


@pytest.mark.parametrize("command", [*READING, "retire", "export"])
def test_a_linked_directory_among_logs_is_not_followed_and_is_named(
    run: Any, long_log: Path, elsewhere: Path, command: str
) -> None:
    """`retire` deleted 44 segments of a log that was in another directory."""
    before = _content(elsewhere)
    link = long_log.parent / "x"
    link.symlink_to(elsewhere.absolute())
    arguments = {**ARGUMENTS, "export": ("--perfetto",), "retire": ("--max-age", "0s")}.get(command, ())
    result = run(command, long_log.parent, *arguments)
    assert str(link) in result.err
    assert result.exit_code == 2
    assert _content(elsewhere) == before
    assert f"{link}: is a symbolic link, which kvledger does not follow; remove the link" in result.err


def test_a_link_that_is_the_only_log_of_a_directory_is_not_followed(run: Any, elsewhere: Path, tmp_path: Path) -> None:
    """No command takes it for the log that is meant."""
    before = _content(elsewhere)
    box = tmp_path / "box"
    box.mkdir()
    (box / "x").symlink_to(elsewhere.absolute())
    for command in (*READING, "export", "core"):
        result = run(command, box, *{**ARGUMENTS, "export": ("--perfetto",)}.get(command, ()))
        assert result.exit_code == 2, command
        assert "is a symbolic link, which kvledger does not follow" in result.err
    assert run("retire", box, "--max-bytes", "1").exit_code == 64
    assert _content(elsewhere) == before


def test_the_newest_start_is_never_a_link(run: Any, long_log: Path, elsewhere: Path) -> None:
    """`--newest` reads the log that is in the directory."""
    (long_log.parent / "zzz").symlink_to(elsewhere.absolute())
    result = run("show", long_log.parent, "--newest")
    assert result.exit_code == 0
    assert f"reading {long_log}" in result.err
    assert "zzz: is a symbolic link, which kvledger does not follow" in result.err


def test_a_link_to_a_neighbour_costs_nothing(run: Any, long_log: Path) -> None:
    """People make a link `latest`. The log is read under its own name, once."""
    alone = run("verify", long_log.parent)
    (long_log.parent / "latest").symlink_to(long_log.name)
    assert run("verify", long_log.parent) == alone
    assert alone.exit_code == 0
    assert run("retire", long_log.parent, "--max-bytes", "1GiB").exit_code == 0


def test_the_path_that_is_given_may_be_a_link(run: Any, long_log: Path, tmp_path: Path) -> None:
    """To a directory of logs, to a log, to a segment: what a person names is followed."""
    (segment,) = [min(long_log.glob("*.kvlog"))]
    for number, path in enumerate((long_log.parent, long_log, segment)):
        link = tmp_path / f"link-{number}"
        link.symlink_to(path)
        for command in ("verify", "show", "ls", "stats"):
            direct, linked = run(command, path), run(command, link)
            assert linked.exit_code == direct.exit_code == 0, (command, path)
            assert linked.out == direct.out
    link = tmp_path / "link-1"
    assert run("retire", link, "--max-bytes", "1").exit_code == 0
    assert len(list(long_log.glob("*.kvlog"))) == 1


def test_a_pipe_of_the_shell_is_refused_with_a_remedy(run: Any, long_log: Path) -> None:
    """`kvledger show <(cat SEGMENT)` said that a link should be removed."""
    reading, writing = os.pipe()
    try:
        os.write(writing, min(long_log.glob("*.kvlog")).read_bytes())
        result = run("show", f"/dev/fd/{reading}")
    finally:
        os.close(reading)
        os.close(writing)
    assert result.exit_code == 2
    assert "leads to a pipe or a deleted file, which kvledger does not read; give a regular file" in result.err


@pytest.mark.parametrize("kind", FOREIGN)
def test_an_index_that_is_no_file_is_not_read_or_waited_for(
    run: Any, long_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It is made anew, for its owner only, and what a link leads to stays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("kvledger.adapters.tools.logs.index.INDEX_FROM_BYTES", 1)
    expected = run("show", long_log, "chat-17")
    (index,) = (tmp_path / "cache" / "kvledger" / "indexes").iterdir()
    planted = plant(index, kind, tmp_path / "victim")
    result = run("show", long_log, "chat-17")
    assert result.out == expected.out
    planted.check_untouched()
    if kind != "directory":
        assert index.is_file()
        assert not index.is_symlink()
        assert index.stat().st_mode & 0o777 == 0o600


def test_an_index_and_its_directories_are_for_their_owner_only_with_any_umask(
    run: Any, long_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With umask 0 the directories above the index were open to everybody, who could then replace it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("kvledger.adapters.tools.logs.index.INDEX_FROM_BYTES", 1)
    before = os.umask(0)
    try:
        assert run("show", long_log, "chat-17").exit_code == 0
        assert write_snapshots(open_log(long_log)) > 0
        assert run("retire", long_log, "--max-bytes", "1").exit_code == 0
    finally:
        os.umask(before)
    made = [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in long_log.iterdir()} <= {0o644}
