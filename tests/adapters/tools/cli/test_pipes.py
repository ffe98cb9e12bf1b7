"""`| head` ends every command quietly with 141: no traceback, no false alarm, also when nothing was read at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver
from processes import finished, started
from stored_logs import write_log

COMMAND = [sys.executable, "-m", "kvledger.adapters.tools.cli.main"]

COMMANDS = [
    "--help",
    "verify LOG",
    "show LOG --json",
    "show LOG --follow",
    "why LOG chat-17",
    "stats LOG",
    "show LOG --at 20",
    "export LOG --perfetto",
    "retire LOG --max-bytes 1KiB --dry-run",
    "ship --help",
]
MORE_COMMANDS = [
    "--version",
    "show --help",
    "verify LOG --json",
    "show LOG",
    "show LOG chat-17",
    "show LOG --at 5 --json",
    "show LOG --follow --json",
    "why LOG chat-17 --json",
    "stats LOG --json",
    "export LOG --perfetto",
    "export LOG --html",
]


def more(commands: list[str]) -> list[Any]:
    """Commands that end as others do."""
    return [pytest.param(command, marks=pytest.mark.long) for command in commands]


def in_words(command: str, log: Path) -> list[str]:
    """The command line."""
    return [*COMMAND, *(str(log) if word == "LOG" else word for word in command.split())]


def pipe_without_reader() -> int:
    """The writing end of a pipe whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("command", [*COMMANDS, *more(MORE_COMMANDS)])
def test_a_reader_that_goes_before_the_first_byte_gives_141(command: str, log: Path) -> None:
    """However little is printed: also what only the last flush would have written."""
    writing = pipe_without_reader()
    try:
        result = finished(in_words(command, log), stdout=writing)
    finally:
        os.close(writing)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize(
    "command",
    [
        "show LOG --follow",
        "export LOG --perfetto",
        *more(["show LOG --limit 0", "show LOG --json", "export LOG --perfetto"]),
    ],
)
def test_a_reader_that_goes_after_the_first_line_of_many_gives_141(tmp_path: Path, command: str) -> None:
    """In the middle of the work; nothing is reported as damage or as an event that cannot be folded."""
    driver = Driver()
    for number in range(3000):
        driver.arrive(f"request-{number}", 5)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    words = in_words(command, log)
    with started(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() != b""
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


@pytest.mark.parametrize("command", ["verify nowhere", "verify", "show LOG chat-17 --at 9999", "stats DAMAGED"])
def test_a_reader_of_stderr_that_goes_gives_141(command: str, log: Path) -> None:
    """`2>&1 | head`: messages, usage and remarks."""
    if "DAMAGED" in command:
        (segment,) = log.glob("*.kvlog")
        segment.write_bytes(segment.read_bytes()[:-1])
    writing = pipe_without_reader()
    try:
        words = in_words(command.replace("DAMAGED", "LOG"), log)
        result = finished(words, stderr=writing)
    finally:
        os.close(writing)
    assert result.returncode == 141


def test_an_export_to_a_file_is_whole_though_nobody_reads_what_is_printed_of_it(log: Path, tmp_path: Path) -> None:
    """The file is there before it is reported, and no part of one is left behind."""
    writing = pipe_without_reader()
    try:
        words = [*in_words("export LOG --perfetto", log), "-o", str(tmp_path / "trace.json")]
        result = finished(words, stdout=writing, stderr=writing)
    finally:
        os.close(writing)
    assert result.returncode == 141
    assert (tmp_path / "trace.json").read_bytes().endswith(b"}\n")
    assert list(tmp_path.glob(".*")) == []


def test_a_full_disk_behind_stdout_gives_74_and_closed_streams_are_no_error(log: Path) -> None:
    """Neither is a judgement of the log."""
    with Path("/dev/full").open("wb") as full:
        result = finished(in_words("verify LOG", log), stdout=full)
    assert result.returncode == 74
    assert result.stderr == (
        "kvledger: the output cannot be written: [Errno 28] No space left on device; make room, or write "
        "the output elsewhere\n"
    )
    words = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *in_words("verify LOG", log)]
    assert finished(words).returncode == 0
