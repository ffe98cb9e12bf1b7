"""Exceptions raised while reading a log. Each message names the input, the reason and the remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode, unreadable_text
from kvledger.adapters.tools.logs.finding import RequestAmbiguous as AmbiguousId
from kvledger.adapters.tools.logs.finding import RequestUnknown as UnknownId
from kvledger.adapters.tools.logs.visible import visible


class Error(Exception):
    """Base class of `LogNotFound`, `LogUnreadable`, `RequestNotFound` and `RequestAmbiguous`."""


class LogNotFound(Error):
    """The path does not exist, or contains no log."""


class LogUnreadable(Error):
    """The log exists, but cannot be read or lacks what the call needs."""


class RequestNotFound(Error):
    """No request id equals or contains the given text."""


class RequestAmbiguous(Error):
    """Several request ids contain the given text, or several logs contain the id."""


_OPTIONS_AS_ARGUMENTS = {"--lenient": "lenient=True"}
"""Option that a command's remedy names → argument of `open_log` with the same effect."""


@contextlib.contextmanager
def public_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading the log at `path` into the exceptions of this module."""
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
