"""Mirrors the logs of a NATS stream to disk, so that commands can read them like any log.

Only this module and `ship` import the NATS client, and only if a stream is used.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.tools.logs.visible import remark
from kvledger.lifecycle import without_credentials
from kvledger.storage.events import LogError

if TYPE_CHECKING:
    from kvledger.storage.events.nats import StreamAddress

_REFRESH_EVERY_S: Final = 1.0
_SCHEMES: Final = ("nats://", "tls://")
_URL: Final = re.compile("[A-Za-z][A-Za-z0-9+.-]*://")


@attrs.frozen
class StreamUrl:
    """A URL given in place of a path. `str()` leaves out credentials."""

    text: str = attrs.field(repr=False)

    def __str__(self) -> str:
        return without_credentials(self.text, is_address=True)


def log_argument(text: str) -> Path | StreamUrl:
    """Return a LOG argument as a URL if it is one, else as a path. `Path` would remove a slash of a URL."""
    return StreamUrl(text) if _URL.match(text) else Path(text)


def was_stream(path: Path) -> bool:
    """Whether a path was made from a stream's URL. `Path` keeps only one slash of `nats://`."""
    return str(path).startswith(tuple(scheme[:-1] for scheme in _SCHEMES))


def shown_log(log: Path | StreamUrl | str) -> str:
    """Return a LOG argument as text for messages. Credentials are removed unless it is the path of an existing file."""
    if isinstance(log, StreamUrl) or os.path.lexists(log):
        return str(log)
    return without_credentials(str(log), is_address=True)


def parse_address(url: StreamUrl) -> StreamAddress:
    """Parse a stream's URL.

    Raises:
        CommandFailed: the URL is not a stream's, or the NATS client is not installed.
    """
    if not url.text.startswith(_SCHEMES):
        message = f"{url}: not an address of logs; give a path, or nats://host/STREAM[/LOG_ID]"
        raise CommandFailed(message, ExitCode.REFUSED)
    with stream_errors():
        from kvledger.storage.events.nats import StreamAddress  # noqa: PLC0415 - the import takes a fifth of a second

        return StreamAddress.parse(url.text)


def mirrored_logs(url: StreamUrl, directory: Path | None, *, newest: bool) -> list[Path]:
    """Update the mirror of the logs at a URL, and return the log directories.

    With `newest`, only the logs of the newest engine start are mirrored.

    Raises:
        CommandFailed: mirroring failed.
    """
    address = parse_address(url)
    from kvledger.storage.events.nats import mirror  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty())
    with stream_errors(), bar:
        task = bar.add_task(f"fetching from {address}", total=None)

        def update(num_messages: int, num_all: int) -> None:
            bar.update(task, completed=num_messages, total=num_all)

        return mirror(address, directory, newest=newest, on_progress=update, on_skipped=remark)


def keep_mirrored(url: StreamUrl, directory: Path | None, *, newest: bool) -> None:
    """Update the mirror every second in a thread, for a command that follows a log."""
    address = parse_address(url)
    from kvledger.storage.events.nats import mirror  # noqa: PLC0415

    def refresh() -> None:
        while True:
            time.sleep(_REFRESH_EVERY_S)
            try:
                mirror(address, directory, newest=newest)
            except (LogError, OSError) as error:
                remark(str(error))

    threading.Thread(target=refresh, name="kvledger-mirror", daemon=True).start()


@contextlib.contextmanager
def stream_errors() -> Iterator[None]:
    """Turn errors of a stream into `CommandFailed`."""
    from kvledger.storage.events.nats import StreamRefused, StreamUnavailable  # noqa: PLC0415

    try:
        yield
    except StreamRefused as error:
        raise CommandFailed(str(error), ExitCode.REFUSED) from error
    except StreamUnavailable as error:
        raise CommandFailed(str(error), ExitCode.TRY_AGAIN) from error
    except LogError as error:
        raise CommandFailed(str(error), ExitCode.DAMAGED) from error
