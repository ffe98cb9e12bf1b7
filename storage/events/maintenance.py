"""What a writer leaves to a thread of its own when its log goes on in a new segment: snapshots, then retention.

Nothing here keeps an append waiting but a pass of retention that is still under way. Who makes snapshots, and how, is
the business of whoever gives the maker.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Protocol

from kvledger.storage.events.retention import Trouble, ignore, retire_logs
from kvledger.storage.events.store import LogError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Maintenance", "SnapshotMaker"]


class SnapshotMaker(Protocol):
    """Makes the snapshots that a log lacks."""

    def make(self, directory: Path) -> None:
        """Return when the segments that the log in `directory` has now have theirs, or cannot have. Never raises."""

    def stop(self) -> None:
        """Have `make` return soon, from whatever thread it was called; it makes nothing any more."""


class Maintenance:
    """Of the log that a store writes, and of all logs next to it.

    A store calls `start` when it is opened and when it goes on in a new segment. First `snapshots` are made, so that
    what is left of the log can be begun; then the oldest segments are retired. What cannot be deleted is reported to
    `on_trouble`, from that thread, and tried again the next time.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        max_age_seconds: float | None = None,
        *,
        snapshots: SnapshotMaker | None = None,
        on_trouble: Trouble = ignore,
    ) -> None:
        """Set the limits of all logs in the directory; None: none."""
        self.max_bytes: Final = max_bytes
        self.max_age_seconds: Final = max_age_seconds
        self._snapshots = snapshots
        self._on_trouble = on_trouble
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_making = False
        """Whether the thread makes snapshots, and will look once more."""
        self._has_grown = False
        """Whether the log has gone on in another segment meanwhile."""

    def start(self, directory: Path, segment_bytes: int) -> None:
        """Begin, while the last segment of the log in `directory` may grow to `segment_bytes`.

        That much is retired beforehand: while this runs, one segment more may be filled, and so the limit is exceeded
        by no more than one, and what is written while snapshots are made. Waits for retention that is under way, so
        that it does not become two; never for a snapshot.
        """
        if self._snapshots is None and self.max_bytes is None and self.max_age_seconds is None:
            return
        with self._lock:
            if self._is_making:
                self._has_grown = True
                return
        self.wait()
        self._is_making = self._snapshots is not None
        self._thread = threading.Thread(
            target=self._run, args=(directory, segment_bytes), name="kvledger-maintenance", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Return when nothing is under way; a snapshot that is being made is given up."""
        if self._snapshots is not None:
            self._snapshots.stop()
        self.wait()

    def wait(self) -> None:
        """Return when nothing is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, directory: Path, segment_bytes: int) -> None:
        if self._snapshots is not None:
            self._make_snapshots(self._snapshots, directory)
        if self.max_bytes is None and self.max_age_seconds is None:
            return
        max_bytes = None if self.max_bytes is None else max(0, self.max_bytes - segment_bytes)
        try:
            retire_logs(
                directory.parent,
                max_bytes=max_bytes,
                max_age_seconds=self.max_age_seconds,
                in_use=directory,
                on_trouble=self._on_trouble,
            )
        except (OSError, LogError) as error:
            self._on_trouble(error)

    def _make_snapshots(self, snapshots: SnapshotMaker, directory: Path) -> None:
        while True:
            snapshots.make(directory)
            with self._lock:
                self._is_making, self._has_grown = self._has_grown, False
                if not self._is_making:
                    return
