"""What reading a log raises: one base class, and a message that names the input, the reason and the remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode, unreadable_text
from kvledger.adapters.tools.logs.finding import RequestAmbiguous as AmbiguousId
from kvledger.adapters.tools.logs.finding import RequestUnknown as UnknownId
from kvledger.adapters.tools.logs.visible import visible


class Error(Exception):
    """The base of all exceptions below."""


class LogNotFound(Error):
    """There is nothing at the path, or no log."""


class LogUnreadable(Error):
    """There is a log, and it cannot be read, or lacks what the question needs."""


class RequestNotFound(Error):
    """No request has the given id, or the given part in its id."""


class RequestAmbiguous(Error):
    """Several requests have the given part in their ids, or several logs have the id."""


_OPTIONS_AS_ARGUMENTS = {"--lenient": "lenient=True"}
"""Option of the command that a remedy may name → the same as an argument of `open_log`."""


@contextlib.contextmanager
def public_errors(path: Path) -> Iterator[None]:
    """Raise the errors above where the tools raise their own while they read the log at `path`."""
    try:
        yield
    except CommandFailed as error:
        raise _public(error) from error.__cause__
    except OSError as error:
        text = unreadable_text(error)
        raise LogUnreadable(visible(text if error.filename else f"{path}: {text}")) from error


def _public(error: CommandFailed) -> Error:
    text = str(error)
    for option, argument in _OPTIONS_AS_ARGUMENTS.items():
        text = text.replace(option, argument)
    if isinstance(error, UnknownId):
        return RequestNotFound(visible(text))
    if isinstance(error, AmbiguousId):
        return RequestAmbiguous(visible(text))
    return (LogNotFound if error.exit_code is ExitCode.USAGE else LogUnreadable)(visible(text))
