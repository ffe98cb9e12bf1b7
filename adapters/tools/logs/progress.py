"""Callbacks that report the progress of a long reading, for example on a terminal."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from kvledger.adapters.tools.logs.log import StoredLog


class Progress(Protocol):
    """Receives the progress and the remarks of code that reads a log."""

    def progress(self, log: StoredLog, what: str, /) -> AbstractContextManager[None]:
        """Show, until the context ends, how much of the log has been read. `what` describes the work."""

    def waiting(self, what: str, /) -> AbstractContextManager[object]:
        """Show, until the context ends, what is waited for."""

    def remark(self, text: str, /) -> None:
        """Report a text that is not part of the results."""
