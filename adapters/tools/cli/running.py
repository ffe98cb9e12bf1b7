"""Runs one command. Turns an error of the command into an exit code and one line on stderr."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from cyclopts import CycloptsError, MissingArgumentError, UnusedCliTokensError

from kvledger.adapters.tools.cli.options import DEFAULT_LOG
from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.cli.output_failed import OutputFailed
from kvledger.adapters.tools.cli.streams import silence_standard_streams
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode, gravest, unreadable_text
from kvledger.adapters.tools.logs.streams import StreamUrl, log_argument, shown_log
from kvledger.adapters.tools.logs.visible import remark
from kvledger.lifecycle import described, raise_if_unstoppable, without_credentials
from kvledger.storage.extras import EXTRAS


def run_command(command: Callable[..., ExitCode], bound: inspect.BoundArguments, *, is_json: bool) -> ExitCode:
    """Run a command with its arguments and an output. Return the most severe exit code of the command and its logs."""
    output = Output(is_json=is_json)
    log = bound.arguments.get("log", getattr(bound.arguments.get("reading"), "log", None))
    try:
        return gravest([command(*bound.args, **bound.kwargs, output=output), *output.failures])
    except BaseException as error:  # noqa: BLE001 -- the error is explained
        return explained(error, log)


def explained(error: BaseException, log: Path | StreamUrl | None = None) -> ExitCode:
    """Print to stderr why a command failed and what to do, and return the exit code.

    Does not explain an interruption or a failed write of the output. Raises this error again, for `ended`.
    """
    raise_if_unstoppable(error)
    if isinstance(error, CycloptsError):
        remark(_usage(error))
        return ExitCode.USAGE
    if isinstance(error, CommandFailed | OSError):
        text = unreadable_text(error) if isinstance(error, OSError) else str(error)
        if isinstance(log, Path):  # an address without its scheme was parsed as a path
            text = text.replace(str(log), shown_log(log))
        default = os.environ.get(DEFAULT_LOG)
        if log is not None and default and log in {Path(default), log_argument(default)}:
            text += f" (LOG is {shown_log(log)}, from {DEFAULT_LOG})"
        remark(text)
        return ExitCode.DAMAGED if isinstance(error, OSError) else error.exit_code
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        remark(str(error))
        return ExitCode.REFUSED
    if os.environ.get("KVLEDGER_TRACEBACK"):
        sys.stderr.write(without_credentials("".join(traceback.format_exception(error))))
    place = traceback.extract_tb(error.__traceback__)[-1]
    remark(
        f"kvledger failed, so the log was not judged: {described(error)} "
        f"({Path(place.filename).name}:{place.lineno}). Please report the bug with this line, the command and, if "
        "you may share it, the log. Set KVLEDGER_TRACEBACK=1 to print the traceback"
    )
    return ExitCode.INTERNAL_ERROR


def _usage(error: CycloptsError) -> str:
    """Return what is wrong with the arguments, and the command that lists the arguments."""
    names = error.argument.parameter.env_var if isinstance(error, MissingArgumentError) and error.argument else ()
    default = "".join(f" Give LOG, or set the environment variable {name}." for name in names or ())
    command = " ".join(["kvledger", *(error.command_chain or ())])
    text = str(error)
    if isinstance(error, MissingArgumentError) and error.argument is not None and error.argument.index is not None:
        text = f"{error.argument.name.lstrip('-').upper()} is missing"
    elif isinstance(error, UnusedCliTokensError):
        unused = ", ".join(map(repr, error.unused_tokens or ()))
        text = f"{unused}: too many arguments"
    return f"{text}{'' if text.endswith(('.', '?')) else '.'}{default} See {command} --help"


def ended(error: BaseException) -> ExitCode:
    """Return the exit code of a command that was interrupted, or whose output could not be written.

    The output cannot be written, for example, if the program that reads it has ended. Raises any other error again.
    """
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if not isinstance(error, OutputFailed):
        raise error
    if not error.is_reader_gone:
        with contextlib.suppress(OutputFailed):
            remark(f"the output cannot be written: {error}; make room, or write the output elsewhere")
    silence_standard_streams()
    return ExitCode.BROKEN_PIPE if error.is_reader_gone else ExitCode.CANNOT_WRITE
