"""What cannot be read is 2 with its reason and a remedy, and does not spoil its neighbours; a mistake of ours is 70."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver
from stored_logs import write_log

from kvledger.adapters.tools.cli import finding
from kvledger.adapters.tools.cli.commands import COMMANDS as ALL

NOBODY = 65534

COMMANDS = [
    "verify LOG",
    "verify LOG --json",
    "show LOG",
    "show LOG chat-17",
    "show LOG --follow",
    "why LOG chat-17",
    "stats LOG",
    "show LOG --at 20",
    "export LOG --perfetto",
    "export LOG --html",
    "repro LOG -o test_incident.py",
]


@contextlib.contextmanager
def an_ordinary_user() -> Iterator[None]:
    """Root may read everything. What Python imports late may lie where only root may read."""
    for name, command in ALL.items():
        importlib.import_module(command.path(name).partition(":")[0])
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def words(line: str, log: Path | str) -> list[str]:
    """The arguments."""
    return [str(log) if word == "LOG" else word for word in line.split()]


@pytest.fixture
def logs(story: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of two logs, below the working directory: those above may be closed to other users."""
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    for name in ("a", "b"):
        write_log(tmp_path / "logs" / name, story.observed, story.configuration)
    for path in tmp_path.rglob("*"):
        path.chmod(0o755)
    return Path("logs")


@pytest.mark.parametrize("line", COMMANDS)
def test_a_log_without_permission_gives_2(run: Any, logs: Path, line: str) -> None:
    """Its directory, the one above, or one segment: never 1, and never a traceback."""
    (segment,) = (logs / "a").glob("*.kvlog")
    for path, closed in ((logs / "a", logs / "a"), (logs / "a", logs), (logs / "a", segment), (segment, segment)):
        mode = closed.stat().st_mode
        closed.chmod(0)
        try:
            with an_ordinary_user():
                result = run(*words(line, path))
        finally:
            closed.chmod(mode)
        assert result.exit_code == 2, closed
        assert "Permission denied" in result.err
        assert "as a user with read permission" in result.err
        assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize("line", ["verify LOG", "show LOG", "stats LOG", "export LOG --perfetto"])
def test_a_log_that_cannot_be_read_does_not_spoil_its_neighbours(run: Any, logs: Path, line: str) -> None:
    """Closed, a link, a link as a segment, a pipe: each is named, and the others are shown in full."""
    sound = run(*words(line, logs))
    (logs / "closed").mkdir(mode=0)
    (logs / "gone").symlink_to("nowhere")
    (logs / "failing").mkdir()
    (logs / "failing" / "00000000000000000001.kvlog").symlink_to("/proc/self/mem")
    (logs / "pipe").mkdir()
    os.mkfifo(logs / "pipe" / "00000000000000000001.kvlog")  # whoever opens it waits for a writer
    (logs / "no-log").mkdir()
    (logs / "note.txt").write_text("no log either")
    with an_ordinary_user():
        result = run(*words(line, logs))
    assert result.exit_code == 2
    shown = [text for text in sound.out.splitlines() if not text.startswith("logs ")]
    assert [text for text in shown if text not in result.out] == []
    reasons = ("closed: cannot be read (Permission denied)", "gone: is a symbolic link", "failing", "pipe")
    for reason in reasons:
        assert reason in result.err
    assert len(result.err.splitlines()) == len(reasons)
    if line == "verify LOG":
        assert "logs        6, 2 sound, 4 unreadable" in result.out
        with an_ordinary_user():
            named = run("verify", "--json", logs).objects("unreadable")
        assert sorted(str(each["path"]) for each in named) == ["logs/closed", "logs/failing", "logs/gone", "logs/pipe"]


def test_a_request_is_found_next_to_a_log_that_cannot_be_read(run: Any, logs: Path) -> None:
    """The exit code says that one was left out."""
    shutil.rmtree(logs / "b")
    (logs / "closed").mkdir(mode=0)
    with an_ordinary_user():
        result = run("show", logs, "chat-17")
    assert result.exit_code == 2
    assert result.out.startswith("chat-17-b6")


def test_a_log_that_vanishes_while_it_is_read_is_named(run: Any, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention may take a log between two looks at the directory."""
    find_logs = finding.find_logs

    def find_and_lose(*arguments: Any, **options: Any) -> list[Path]:
        found = find_logs(*arguments, **options)
        shutil.rmtree(logs / "a")
        return found

    monkeypatch.setattr(finding, "find_logs", find_and_lose)
    result = run("verify", logs)
    assert result.exit_code == 2
    assert "logs/a: cannot be read (No such file or directory)" in result.err
    assert "logs        2, 1 sound, 1 unreadable" in result.out


@pytest.mark.parametrize("line", COMMANDS)
def test_what_is_no_log_gives_2_or_64(run: Any, logs: Path, line: str) -> None:
    """A link to nothing and a file that is no segment are unreadable; a folder without a log is a typing error."""
    Path("link").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    Path("file").write_text("not a log")
    Path("empty").mkdir()
    for name, exit_code in (("link", 2), ("loop", 2), ("file", 2), ("empty", 64), ("file/log", 64)):
        result = run(*words(line, name))
        assert result.exit_code == exit_code, name
        assert len(result.err.splitlines()) == 1
        assert name in result.err
    assert sorted(path.name for path in logs.iterdir()) == ["a", "b"]


def test_a_mistake_of_ours_gives_70_and_says_how_to_report_it(
    run: Any, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never 1, which would accuse the log; the traceback comes for who asks."""

    def stumble(*_arguments: Any, **_options: Any) -> list[Path]:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(finding, "find_logs", stumble)
    result = run("verify", log)
    assert result.exit_code == 70
    assert "ZeroDivisionError: a mistake (test_unreadable.py:" in result.err
    assert "Please report the bug" in result.err
    assert len(result.err.splitlines()) == 1
    monkeypatch.setenv("KVLEDGER_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in run("verify", log).err


def test_arguments_may_stand_behind_options(run: Any, log: Path) -> None:
    """Whoever adds `--json` does not think of the order."""
    expected = run("why", log, "chat-17", "--json").out
    assert expected
    for line in ("why LOG --json chat-17", "why --json LOG chat-17", "why --json LOG --until 9999 chat-17"):
        assert run(*words(line, log)).out == expected
    assert run("show", log, "--until", 30, "chat-17").out == run("show", log, "chat-17", "--until", 30).out
    assert run("why", log, "--json", "chat-17", "chat-9").exit_code == 64
