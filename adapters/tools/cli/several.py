"""Runs a command on several logs in several processes, and prints their outputs in the order of the logs.

The output is the same as from one process. If a process is killed, the other logs are not affected. This module must
not know what the command does.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import attrs

from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.adapters.tools.logs.processes import ProcessLost, separate_processes
from kvledger.storage.events.files import num_bytes_of
from kvledger.storage.events.segment_file import segment_paths

OnLogs = Callable[[Sequence[Path], Output], list[ExitCode]]
"""Runs the command on some of the logs, and returns the exit code of each log that can be read."""
OnLost = Callable[[Path, str, Output], ExitCode]
"""Reports a log whose process was killed at every try, with the reason; returns the exit code."""


@attrs.frozen
class Printed:
    """Output and exit codes of the command for one log."""

    out: str
    err: str
    codes: list[ExitCode]
    failures: list[ExitCode]


def side_by_side(
    command: OnLogs, logs: Sequence[Path], num_jobs: int, output: Output, *, on_lost: OnLost
) -> list[ExitCode]:
    """Run the command on each log, on `num_jobs` logs at a time. Print the outputs, and return the exit codes."""
    num_logs = len(logs)
    codes: list[ExitCode] = []
    with separate_processes(min(num_jobs, num_logs)) as others:
        begun: dict[Path, Future[Printed]] = {}
        for path in sorted(logs, key=num_bytes, reverse=True):  # the longest job starts first
            begun[path] = others.submit(
                _printed, command, path, is_json=output.is_json, is_terminal=sys.stdout.isatty()
            )
        for number, path in enumerate(logs, 1):
            try:
                with output.waiting(f"log {number} of {num_logs}"):
                    printed = begun[path].result()
            except ProcessLost as lost:
                if codes and not output.is_json:
                    output.line()
                codes.append(on_lost(path, str(lost), output))
                continue
            # Each output begins with an empty line, which the first output does not need.
            sys.stdout.write(printed.out if codes else printed.out.removeprefix("\n"))
            sys.stderr.write(printed.err)
            codes += printed.codes
            output.failures += printed.failures
    return codes


def num_bytes(path: Path) -> int:
    """Return the size of a log in bytes; 0 if the log cannot be read. Opening the log then reports the error."""
    try:
        return sum(map(num_bytes_of, segment_paths(path) if path.is_dir() else [path]))
    except OSError:
        return 0


class _Text(io.StringIO):
    """Replaces stdout, and claims to be a terminal if the real stdout is a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def _printed(command: OnLogs, path: Path, *, is_json: bool, is_terminal: bool) -> Printed:
    with redirect_stdout(_Text(is_terminal=is_terminal)) as out, redirect_stderr(io.StringIO()) as err:
        output = Output(is_json=is_json)
        output.has_many_logs = True
        codes = command([path], output)
    return Printed(out.getvalue(), err.getvalue(), codes, output.failures)
