"""`kvledger completion SHELL`: the script for a shell, and what stands behind the Tab key.

argcomplete is imported here only, and only where a shell asks: a start of the command does not pay for it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from argcomplete import autocomplete
from argcomplete.completers import FilesCompleter
from argcomplete.lexers import split_line
from argcomplete.shell_integration import shellcode

from kvledger.adapters.tools.cli.default_log import DEFAULT_LOG, LogArgument
from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.cli.parser import CommandParser, build_parser
from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.adapters.tools.logs.index import open_index
from kvledger.adapters.tools.logs.log import StoredLog, open_log
from kvledger.adapters.tools.logs.sources import find_logs
from kvledger.lifecycle import events as e

SHELLS: Final = ("bash", "zsh", "fish")
_READ_BYTES: Final = 4 << 20
"""The request ids of a smaller log are read in a moment; those of a larger one stand in its index, if it has one."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to complete")


def run(arguments: argparse.Namespace, output: Output) -> ExitCode:
    """Print the script."""
    script = shellcode(["kvledger"], shell=arguments.shell)
    if output.is_json:
        output.record("completion", {"shell": arguments.shell, "script": script})
    else:
        output.raw(script)
    return ExitCode.SOUND


def complete() -> None:
    """Answer a shell that asks what may stand at the cursor, and end the process."""
    words = os.environ.get("COMP_LINE", "").split()

    def on_command(name: str, parser: CommandParser) -> None:
        if name not in words:
            return
        actions = parser.be_completed()
        takes_request = any(action.dest == "request" and not action.option_strings for action in actions)
        for action in actions:
            if action.dest == "request":
                action.completer = _requests  # type: ignore[attr-defined]
            elif isinstance(action, LogArgument) and takes_request and os.environ.get(DEFAULT_LOG):
                action.completer = _requests_or_files  # type: ignore[attr-defined]

    autocomplete(build_parser(on_command), always_complete_options=False)


def _requests(prefix: str, **_: object) -> list[str]:
    """The ids that begin so, of a log that says it quickly: one on the command line, or the default."""
    line = split_line(os.environ.get("COMP_LINE", ""))
    last, words = line[1], line[3]
    named = (word for word in (*words[2:], last) if word != prefix and Path(word).exists())
    log = next(named, os.environ.get(DEFAULT_LOG))
    found: dict[str, None] = {}
    with contextlib.suppress(Exception):  # whoever presses Tab is told nothing worse than nothing
        for path in find_logs(Path(log)) if log else ():
            found.update(dict.fromkeys(_ids_of(open_log(path), prefix)))
    return [name for name in found if name.startswith(prefix)]


def _requests_or_files(prefix: str, **_: object) -> list[str]:
    """Where KVLEDGER_LOG is set, the first argument may be either."""
    return [*_requests(prefix), *FilesCompleter()(prefix)]


def _ids_of(log: StoredLog, prefix: str) -> Iterator[str]:
    index = open_index(log)
    if index is not None:
        with contextlib.closing(index):
            yield from index.request_ids(prefix)
    elif log.is_smaller_than(_READ_BYTES):
        arrivals = (event for _, event in log.events() if isinstance(event, e.RequestArrived))
        yield from (event.request_id for event in arrivals)
