"""The parser of the command line: one for each command, whose arguments may stand in any order.

A command is a module of its name with `configure(parser)`, which adds its arguments in the order of its usage line, and
`run(arguments, output)`, which returns the exit code. It is imported when it is chosen: a start that imports all
commands takes half as long again.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from kvledger.adapters.tools.cli.commands import COMMANDS, Command
from kvledger.adapters.tools.cli.default_log import DEFAULT_LOG, LogArgument
from kvledger.adapters.tools.cli.options import add_options
from kvledger.adapters.tools.exit_codes import OF_EVERY_COMMAND, ExitCode
from kvledger.adapters.tools.logs.streams import log_argument
from kvledger.lifecycle import __version__, without_credentials

_COLUMNS = 78
_COMMAND = "command"


class _Parser(argparse.ArgumentParser):
    """An argument parser with this command's exit code for wrong usage; 2, argparse's own, means damage here."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ExitCode.USAGE, f"{self.prog}: {without_credentials(message)}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401 -- as in argparse
        """Name the choices that are near, and all only where those are few."""
        if action.choices is not None and value not in action.choices and action.dest == _COMMAND:
            nearest = _nearest(value, action.choices) or "; --help says what there is"
            raise argparse.ArgumentError(None, f"there is no command {value!r}{nearest}")
        super()._check_value(action, value)


class CommandParser(_Parser):
    """The parser of one command: its positional arguments may stand before, between and behind its options."""

    command: str | None = None
    """The module that has the rest of its arguments, until it is chosen."""
    _is_intermixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # noqa: ANN401 -- as in argparse
        """Parse the arguments of the command, whatever their order, and put KVLEDGER_LOG where LOG is left out."""
        if self._is_intermixing:  # called by what is called below
            return super().parse_known_args(args, namespace)
        self._import_command()
        self._is_intermixing = True
        try:
            found, rest = self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_intermixing = False
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._remedy(rest[0])}")
        log = next((action for action in self._actions if isinstance(action, LogArgument)), None)
        if log is not None and not log.settle(found):
            self.error(f"the following arguments are required: LOG; {DEFAULT_LOG} in the environment stands for it")
        return found, rest

    def be_completed(self) -> list[argparse.Action]:
        """Have all arguments, and parse them in their order: who completes asks for the next one. Returns them."""
        self._import_command()
        self._is_intermixing = True
        for action in self._actions:
            if not action.option_strings and action.nargs == argparse.OPTIONAL:
                action.nargs = None
        return self._actions

    def format_help(self) -> str:
        """With exit codes and examples, which are put together when somebody asks."""
        about = COMMANDS[self.prog.split()[-1]]
        self.description, self.epilog = _sentence(about.help), _epilog(about)
        return super().format_help()

    def _remedy(self, unknown: str) -> str:
        if "-o" in self._option_string_actions and not unknown.startswith("-"):
            return f"; -o names the file to write: -o {unknown}"
        return _nearest(unknown, self._option_string_actions) or "; --help lists what there is"

    def _import_command(self) -> None:
        name, self.command = self.command, None
        if name is not None:
            module = _module_of(name)
            module.configure(self)
            self.set_defaults(run=module.run)


def _module_of(command: str) -> Any:  # noqa: ANN401 -- modules have `configure` and `run`
    """Import the module of a command: one of the tools', or the entry point of its name."""
    module = f"kvledger.adapters.tools.cli.{command}"
    if importlib.util.find_spec(module) is not None:
        return importlib.import_module(module)
    (found,) = entry_points(group="kvledger.commands", name=command)
    return found.load()


def build_parser(on_command: Callable[[str, CommandParser], object] = lambda *_: None) -> argparse.ArgumentParser:
    """All commands and options; `on_command` is given the name and the parser of each."""
    parser = _Parser(prog="kvledger", description="Reads the event logs of kvledger.", epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"kvledger {__version__}")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    json = CommandParser(add_help=False)
    # Without a default here: it would overwrite a --json given before the command.
    json.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object a line")
    reading = CommandParser(add_help=False, parents=[json])
    reading.add_argument(
        "log",
        action=LogArgument,
        type=log_argument,
        help="a log directory, one *.kvlog file, a directory of logs (all of them), or nats://host/STREAM[/LOG_ID]",
    )
    reading.add_argument(
        "--newest",
        action="store_true",
        help="of a directory of logs, read only the newest engine start: the log of its scheduler",
    )
    reading.add_argument("--mirror", metavar="DIR", type=Path, help="where the files of a stream's logs are kept")
    add_options(reading)
    commands = parser.add_subparsers(dest=_COMMAND, metavar="COMMAND", required=True, parser_class=CommandParser)
    for name, command in COMMANDS.items():
        of_command = commands.add_parser(
            name,
            parents=[reading if command.is_reading else json],
            help=command.help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        of_command.command = name
        of_command.set_defaults(is_reading=command.is_reading)
        on_command(name, of_command)
    return parser


_EPILOG = "COMMAND --help has its exit codes and examples. KVLEDGER_LOG is the LOG where none is named."


def _nearest(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word.partition("=")[0], words)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _sentence(text: str) -> str:
    return textwrap.fill(f"{text[0].upper()}{text[1:]}.", _COLUMNS)


def _epilog(command: Command) -> str:
    """Exit codes and examples, as `--help` shows them below the options."""
    examples = "\n".join(f"  {line}\n      {what}" for what, line in command.examples.items())
    others = {code: text for code, text in OF_EVERY_COMMAND.items() if code not in command.exit_codes}
    return f"exit codes:\n{_codes(command.exit_codes)}\nof every command:\n{_codes(others)}\n\nexamples:\n{examples}"


def _codes(codes: Mapping[ExitCode, str]) -> str:
    lines = (
        textwrap.fill(text, _COLUMNS, initial_indent=f"  {code.value:<4}", subsequent_indent=" " * 6)
        for code, text in codes.items()
    )
    return "\n".join(lines)
