"""The `kvledger` command: reads arguments, runs one command, turns what happens into an exit code.

A command is a module of its name with `configure(parser)`, which adds its arguments in the order of its usage line, and
`run(arguments, output)`, which returns the exit code; `arguments.logs` are the logs that were found, in the order in
which they were opened. It is imported when it is chosen: a start that imports all commands takes half as long again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import attrs

from kvledger.adapters.cli.options import add_options
from kvledger.adapters.cli.output import Output
from kvledger.adapters.cli.streams import OutputFailed, guard_standard_streams, silence_standard_streams
from kvledger.adapters.exit_codes import CommandFailed, ExitCode, gravest, unreadable_text
from kvledger.adapters.logs.sources import find_logs
from kvledger.adapters.logs.streams import StreamUrl, keep_mirrored, log_argument
from kvledger.adapters.logs.visible import remark

_EXIT_CODES = "exit codes: 0 sound, 1 rule broken, 2 damaged or unreadable, 3 diverged, 4 end missing, 64 wrong usage"


@attrs.frozen
class Command:
    """What is said of a command before its module is imported."""

    help: str
    is_reading: bool = True
    """Whether it takes a LOG to read, and the options for that."""


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "verify": Command("check a log in every way"),
        "show": Command("show a log, or the timeline of a request"),
        "why": Command("say why a request was preempted, missed the cache, computed again"),
        "stats": Command("sum up what the cache did, with a reason for every missed and recomputed token"),
        "replay": Command("fold a log and decide again"),
        "export": Command("write a log as a trace for Perfetto, a page for a ticket, or tables for a notebook"),
        "core": Command(
            "show states, handlers, extensions, rules and tables: of this installation, or of a log", is_reading=False
        ),
        "ship": Command("copy logs into a NATS JetStream stream", is_reading=False),
        "repro": Command("write an incident as a test that drives the recorded hook calls into the connector"),
        "conformance": Command("hold a connector of vLLM's against what vLLM relies on", is_reading=False),
        "snapshot": Command("write the snapshots that a log lacks", is_reading=False),
        "retire": Command("delete the oldest segments of logs that are at rest", is_reading=False),
    }
)
"""By name, in the order of the help text."""


class _Parser(argparse.ArgumentParser):
    """An argument parser with this command's exit code for wrong usage; 2, argparse's own, means damage here."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ExitCode.USAGE, f"{self.prog}: {message}\n")


class _CommandParser(_Parser):
    """The parser of one command: its positional arguments may stand before, between and behind its options."""

    command: str | None = None
    """The module that has the rest of its arguments, until it is chosen."""
    _is_intermixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # noqa: ANN401 -- as in argparse
        if self._is_intermixing:  # called by what is called below
            return super().parse_known_args(args, namespace)
        self._import_command()
        self._is_intermixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_intermixing = False

    def _import_command(self) -> None:
        name, self.command = self.command, None
        if name is not None:
            module = importlib.import_module(f"kvledger.adapters.cli.{name}")
            module.configure(self)
            self.set_defaults(run=module.run)


class _ShowVersion(argparse.Action):
    """Looks the version up when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"kvledger {_version()}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """All commands and options."""
    parser = _Parser(prog="kvledger", description="Reads the event logs of kvledger.", epilog=_EXIT_CODES)
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show program's version number and exit")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    common = _CommandParser(add_help=False)
    common.add_argument(
        "log",
        metavar="LOG",
        type=log_argument,
        help="a log directory, one *.kvlog file, a directory of logs (all of them), or nats://host/STREAM[/LOG_ID]",
    )
    json = _CommandParser(add_help=False)
    # Without a default here: it would overwrite a --json given before the command.
    json.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object a line")
    options = _CommandParser(add_help=False, parents=[json])
    options.add_argument("--newest", action="store_true", help="of a directory of logs, read only the newest")
    options.add_argument("--mirror", metavar="DIR", type=Path, help="where the files of a stream's logs are kept")
    add_options(options)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_CommandParser)
    for name, command in COMMANDS.items():
        parents = [common, options] if command.is_reading else [json]
        of_command = commands.add_parser(name, parents=parents, epilog=_EXIT_CODES, help=command.help)
        of_command.command = name
        of_command.set_defaults(is_reading=command.is_reading)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Nothing is raised; a traceback is printed only if it is asked for."""
    guard_standard_streams()
    try:
        exit_code = _run(argv)
        sys.stdout.flush()
        sys.stderr.flush()
    except OutputFailed as failure:
        if not failure.is_reader_gone:
            with contextlib.suppress(OutputFailed):
                remark(f"the output cannot be written: {failure}; make room, or write elsewhere")
        silence_standard_streams()
        return (ExitCode.BROKEN_PIPE if failure.is_reader_gone else ExitCode.CANNOT_WRITE).value
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED.value
    return exit_code


def _run(argv: Sequence[str] | None) -> int:
    try:
        arguments = build_parser().parse_args(argv)
        arguments.logs = _logs(arguments) if arguments.is_reading else []
        output = Output(is_json=arguments.json)
        output.has_many_logs = len(arguments.logs) > 1
        return int(gravest([arguments.run(arguments, output), *output.failures]))
    except SystemExit as exit_:  # argparse, after --help, --version or wrong usage
        return exit_.code if isinstance(exit_.code, int) else ExitCode.SOUND.value
    except CommandFailed as failure:
        remark(str(failure))
        return failure.exit_code.value
    except OSError as error:
        remark(unreadable_text(error))
        return ExitCode.DAMAGED.value
    except Exception as error:  # noqa: BLE001 -- the last place that can say it in words
        _report_mistake(error)
        return ExitCode.INTERNAL_ERROR.value


def _report_mistake(error: Exception) -> None:
    """Say what a person can do about a mistake of ours; KVLEDGER_TRACEBACK has it in full."""
    if os.environ.get("KVLEDGER_TRACEBACK"):
        traceback.print_exception(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    remark(
        f"a mistake in kvledger itself, and no judgement of the log: {type(error).__name__}: "
        f"{error} ({Path(place.filename).name}:{place.lineno}). Please report it with this line, the command and, if "
        "you may share it, the log; KVLEDGER_TRACEBACK=1 prints the traceback"
    )


def _logs(arguments: argparse.Namespace) -> list[Path]:
    logs = find_logs(arguments.log, arguments.mirror, newest=arguments.newest)
    if isinstance(arguments.log, StreamUrl) and getattr(arguments, "follow", False):
        keep_mirrored(arguments.log, arguments.mirror, newest=arguments.newest)
    if arguments.newest and len(logs) > 1:
        remark(f"reading {logs[-1]}, the newest of {len(logs)} logs in {arguments.log}")
        return logs[-1:]
    return logs


def _version() -> str:
    try:
        return version("kvledger")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
