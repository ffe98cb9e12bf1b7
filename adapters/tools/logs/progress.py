"""Progress callbacks of long readings: a terminal, a page, nobody."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from kvledger.adapters.tools.logs.log import StoredLog


class Progress(Protocol):
    """What a reader of logs reports besides its results."""

    def progress(self, log: StoredLog, what: str, /) -> AbstractContextManager[None]:
        """Show how much of the log is read while the context lasts; `what` is being done."""

    def remark(self, text: str, /) -> None:
        """Something that is no result and should be known."""
