"""The `kvledger` command: reads arguments, runs one command, turns what happens into an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from kvledger.adapters.cli import replay, show, verify
from kvledger.adapters.cli.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.cli.logs import find_log
from kvledger.adapters.cli.output import Output

_EXIT_CODES = "exit codes: 0 sound, 1 rule broken, 2 damaged or unreadable, 3 diverged, 64 wrong usage"


class _Parser(argparse.ArgumentParser):
    """An argument parser with this command's exit code for wrong usage; 2, argparse's own, means damage here."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ExitCode.USAGE, f"{self.prog}: {message}\n")


def _sequence(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


_sequence.__name__ = "event number (1 is the first)"


def build_parser() -> argparse.ArgumentParser:
    """All commands and options."""
    parser = _Parser(prog="kvledger", description="Reads the event logs of kvledger.", epilog=_EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"kvledger {_version()}")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    common = _Parser(add_help=False)
    # Without a default here: it would overwrite a --json given before the command.
    common.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object a line")
    common.add_argument(
        "log", metavar="LOG", type=Path, help="a log directory, one *.kvlog file, or a directory of logs (the newest)"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    command = commands.add_parser("verify", parents=[common], epilog=_EXIT_CODES, help="check a log in every way")
    command.add_argument(
        "-v", "--verbose", action="store_true", help="list the rules that a log cannot decide, and why"
    )
    command.set_defaults(run=verify.run)

    command = commands.add_parser(
        "show", parents=[common], epilog=_EXIT_CODES, help="show a log, or one request's life"
    )
    command.add_argument("request", metavar="REQUEST", nargs="?", help="a request id or its unique beginning")
    command.add_argument("--at", metavar="EVENT", type=_sequence, help="show the state after this event instead")
    command.set_defaults(run=show.run)

    command = commands.add_parser("replay", parents=[common], epilog=_EXIT_CODES, help="fold a log and decide again")
    command.add_argument("--at", metavar="EVENT", type=_sequence, help="stop after this event; default: the last")
    command.set_defaults(run=replay.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        arguments = build_parser().parse_args(argv)
        _name_chosen_log(arguments)
        exit_code = int(arguments.run(arguments, Output(is_json=arguments.json)))
        sys.stdout.flush()
    except SystemExit as exit_:  # argparse, after --help, --version or wrong usage
        return exit_.code if isinstance(exit_.code, int) else ExitCode.SOUND.value
    except CommandFailed as failure:
        sys.stderr.write(f"kvledger: {failure}\n")
        return failure.exit_code.value
    except BrokenPipeError:
        # The reader has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.BROKEN_PIPE.value
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED.value
    return exit_code


def _name_chosen_log(arguments: argparse.Namespace) -> None:
    """Say which log of a directory of logs is read."""
    chosen = find_log(arguments.log)
    if chosen != arguments.log:
        sys.stderr.write(f"kvledger: reading {chosen}, the newest log in {arguments.log}\n")
        arguments.log = chosen


def _version() -> str:
    try:
        return version("kvledger")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
