"""Progress callbacks of long readings, for a terminal, a page, or no output."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from kvledger.adapters.tools.logs.log import StoredLog


class Progress(Protocol):
    """What a reader of logs reports besides its results."""

    def progress(self, log: StoredLog, what: str, /) -> AbstractContextManager[None]:
        """Show how much of the log is read while the context lasts. `what` describes the work."""

    def remark(self, text: str, /) -> None:
        """Report something that is not a result."""
