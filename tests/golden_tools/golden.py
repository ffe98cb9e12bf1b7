"""A golden log of a tool: a story, how the tool is run on its log, and the output that follows from the story."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from golden_tools.story import Story
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.exit_codes import ExitCode

MS = 1_000_000
"""Nanoseconds."""


@attrs.frozen
class Golden:
    """One way to ask a tool. `expected` is derived from the story alone, without the tool."""

    command: str
    story: Story
    output_of: Callable[[Path], Sequence[object]]
    """Log → what the tool says of it, without paths, versions and sizes of the log, which the story does not tell."""
    expected: Sequence[object]


def printed(*arguments: object) -> list[str]:
    """Run a command and return the lines that it prints, without the spaces that align them."""
    written, error = io.BytesIO(), io.StringIO()
    out = io.TextIOWrapper(written, encoding="utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        exit_code = main([str(argument) for argument in arguments])
    assert exit_code < ExitCode.USAGE, error.getvalue()
    return [" ".join(line.split()) for line in written.getvalue().decode().splitlines()]


def records(type_name: str, *arguments: object) -> Iterator[dict[str, Any]]:
    """The JSON objects of a type that a command prints."""
    for line in printed(*arguments, "--json"):
        record: dict[str, Any] = json.loads(line)
        if record["type"] == type_name:
            yield record


def without(lines: Sequence[str], *names: str) -> list[str]:
    """The lines that do not begin with one of these words."""
    return [line for line in lines if not line.startswith(names)]


def picked(record: dict[str, Any], names: Sequence[str]) -> tuple[object, ...]:
    """These fields of it; lists as tuples."""
    return tuple(tuple(value) if isinstance(value, list) else value for value in map(record.get, names))


def time_of_day(milliseconds: float) -> str:
    """Logs of stories are opened at 15:06:40 and last less than a second."""
    return f"15:06:40.{int(milliseconds):03}"
