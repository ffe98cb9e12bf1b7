"""On a terminal of 80 columns everything can be read."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver
from processes.terminal import terminal_output
from rich.cells import cell_len
from stored_logs import OPENED_AT, tell_story, write_log

LONG = "cmpl-8f3a1c5e9b7d4f6a8c2e1d3b5a7f9e0c-0-a1b2c3d4"


def on_terminal(*words: object, columns: int = 80, **environment: str) -> str:
    """What the command prints on a terminal so wide, with its escape sequences."""
    command = [sys.executable, "-m", "kvledger.adapters.tools.cli.main", *map(str, words)]
    without = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "COLUMNS"}}
    shown = terminal_output(command, columns=columns, env={**without, "TERM": "xterm", **environment})
    return shown.decode().replace("\r\n", "\n")


def lines_of(shown: str) -> list[str]:
    """The lines without colours."""
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()]


@pytest.fixture(scope="module")
def long_ids() -> Driver:
    """The story with ids as vLLM's server makes them."""
    return tell_story(LONG, f"{LONG[:7]}-another-one-that-is-as-long-as-the-other", clock_rate=1000)


@pytest.fixture
def log_of_long_ids(long_ids: Driver, tmp_path: Path) -> Path:
    """As a log."""
    return write_log(tmp_path / "log", long_ids.observed, long_ids.configuration)


@pytest.mark.parametrize("words", ["show", "show cmpl-8f3a1", "why cmpl-8f3a1", "stats", "verify -v", "show --at 50"])
def test_no_line_is_wider_than_the_terminal(words: str, log_of_long_ids: Path) -> None:
    """Text is folded behind what it belongs to, and a cell of a table in its column."""
    command, *others = words.split()
    lines = lines_of(on_terminal(command, log_of_long_ids, *others))
    assert lines
    assert max(map(cell_len, lines)) <= 80


@pytest.mark.parametrize("columns", [60, 70])
def test_a_reason_is_folded_behind_its_cause_or_stands_below_it(log_of_long_ids: Path, columns: int) -> None:
    """Only a cause begins a line, with its time: whoever reads down the margin takes nothing else for one."""
    lines = lines_of(on_terminal("why", log_of_long_ids, LONG, columns=columns))
    causes = [at for at, line in enumerate(lines) if line.startswith("15:06:40.")]
    others = set(range(causes[0], lines.index(""))).difference(causes)
    assert len(others) > len(causes)
    assert [lines[at] for at in sorted(others) if not lines[at].startswith("    ")] == []


def test_a_narrow_terminal_leaves_out_columns_and_names_them(log_of_long_ids: Path) -> None:
    """Incident: thirteen columns in 80 broke every cell of the list of requests into pieces."""
    lines = lines_of(on_terminal("show", log_of_long_ids))
    (head,) = (line for line in lines if line.startswith("request "))
    assert "preempted" in head
    assert "lookups" not in head
    assert any(line.startswith("no room for the columns lookups") for line in lines)
    wide = lines_of(on_terminal("show", log_of_long_ids, columns=240))
    assert any("lookups" in line for line in wide)
    assert not any(line.startswith("no room") for line in wide)


def test_colours_are_for_terminals_that_want_them(log_of_long_ids: Path) -> None:
    """NO_COLOR is heeded."""
    coloured = re.compile(r"\x1b\[(?:\d;)*3\d")
    assert coloured.search(on_terminal("verify", log_of_long_ids))
    assert not coloured.search(on_terminal("verify", log_of_long_ids, NO_COLOR="1"))


def test_times_of_day_stand_beside_the_time_since_the_opening(run: Any, log: Path) -> None:
    """UTC, with the date at the top; and nanoseconds since 1970 for programs."""
    shown = run("show", log, "chat-17").out.splitlines()
    assert shown[0] == "chat-17-b6, 2025-06-15T15:06:40.000Z"
    assert shown[1].startswith("took ")
    assert shown[2].split()[:2] == ["UTC", "ms"]
    assert shown[3].split()[:2] == ["15:06:40.000", "0.001"]
    why = run("why", log, "chat-17").out.splitlines()
    assert why[:2] == shown[:2]
    assert why[2].split()[:2] == ["15:06:40.000", "0.001"]
    for command in (("show", log, "chat-17"), ("why", log, "chat-17"), ("show", "--follow", log)):
        (first, *_) = (each for each in run("--json", *command).objects() if "time_ns" in each)
        assert first["time_unix_ns"] == OPENED_AT + first["time_ns"]
    (request, _) = run("--json", "show", log).objects("request")
    assert request["arrived_unix_ns"] == OPENED_AT + request["arrived_ns"]


def test_another_day_is_said(run: Any, tmp_path: Path) -> None:
    """A line with the date between two days, and none in between."""
    driver = tell_story(clock_rate=10**6)
    opened = 1_767_657_590 * 10**9  # 2026-01-05T23:59:50Z
    log = write_log(tmp_path / "log", driver.observed, driver.configuration, header={"opened_at_unix_ns": opened})
    for command in (("show", log, "chat-17"), ("why", log, "chat-17"), ("show", log, "--follow", "--since", 1)):
        days = [line.strip()[:10] for line in run(*command).out.splitlines() if line.strip().startswith("2026-01-06")]
        assert days == ["2026-01-06"], command


def test_a_log_that_does_not_say_when_it_was_opened_has_no_times_of_day(
    run: Any, story: Driver, tmp_path: Path
) -> None:
    """None are made up."""
    log = write_log(tmp_path / "log", story.observed, story.configuration, header={"opened_at_unix_ns": None})
    assert "UTC" not in run("show", log).out + run("show", log, "chat-17").out
    assert run("why", log, "chat-17").out.splitlines()[0] == "chat-17-b6"
    assert run("--json", "show", log, "chat-17").objects("group")[0]["time_unix_ns"] is None
