"""Every command line that reads a log, made from the list of commands, so that a new command is not forgotten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import attrs

from kvledger.adapters.tools.cli.commands import COMMANDS
from kvledger.adapters.tools.exit_codes import OF_EVERY_COMMAND, ExitCode

LINES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "ls": ("LOG", "LOG --json", "DIR"),
        "top": ("LOG", "DIR --once --json"),
        "verify": ("LOG --jobs 1", "LOG --jobs 1 --json", "LOG --verbose --lenient", "LOG --request REQUEST"),
        "show": (
            *("LOG", "LOG --json", "LOG REQUEST", "LOG REQUEST --json", "LOG --follow", "LOG --since 0.01ms"),
            *("LOG --at 100000", "LOG --at 100000 --json", "LOG REQUEST --at 20"),
        ),
        "why": ("LOG REQUEST", "LOG REQUEST --json"),
        "stats": ("LOG", "LOG --json"),
        "export": (
            "LOG --perfetto -o OUT/trace.json --force --json",
            "LOG --html -o OUT/page.html --force",
            "LOG --otlp OUT/spans.jsonl --force",
        ),
        "tables": ("LOG -o OUT/tables --force", "LOG -o OUT/violations --table violations --force --json"),
        "core": ("LOG", "LOG --json"),
        "repro": (
            "LOG --core --no-run -o OUT/test_incident.py --force",
            "LOG REQUEST --core --pin --no-run -o OUT/test_pinned.py --force --json",
        ),
        "retire": ("LOG --max-bytes 1 --dry-run", "LOG --max-age 0s --dry-run --json"),
    }
)
"""Command → what follows it: LOG, the directory DIR that it is in, OTHER (a sound log), REQUEST, a folder OUT."""
NOT_READING: Mapping[str, str] = MappingProxyType(
    {
        "ship": "needs a server; it reads a log as `LogTail` does, which has a test of its own",
        "conformance": "reads no log but its own",
        "check": "reads no log",
        "completion": "prints a script",
    }
)
"""Command → why no line is run."""


@attrs.frozen
class Line:
    """One command line."""

    command: str
    rest: str

    def arguments(self, places: Mapping[str, str | Path]) -> list[str]:
        """What `main` is given; `places` has LOG, DIR, OTHER, REQUEST and OUT."""
        words = [self.command]
        for word in self.rest.split():
            name, slash, below = word.partition("/")
            words.append(f"{places[name]}{slash}{below}" if name in places else word)
        return words

    @property
    def exit_codes(self) -> set[int]:
        """What it may end with: what the command says of its codes, and those of every command but 70 and signals."""
        never = {ExitCode.INTERNAL_ERROR, ExitCode.INTERRUPTED, ExitCode.BROKEN_PIPE, ExitCode.TRY_AGAIN}
        return {int(code) for code in {*COMMANDS[self.command].exit_codes, *OF_EVERY_COMMAND} - never}

    def __str__(self) -> str:
        return f"{self.command} {self.rest}"


def lines() -> list[Line]:
    """All of them."""
    return [Line(command, rest) for command, each in LINES.items() for rest in each]
