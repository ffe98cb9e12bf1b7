"""What a writer leaves to threads of their own when its log goes on in a new segment: snapshots and retention.

Nothing here keeps the writer waiting but a pass of retention that is still under way. Who makes snapshots, and how, is
the business of whoever gives the maker.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Protocol

from kvledger.storage.events.retention import Trouble, ignore, retire_logs
from kvledger.storage.events.store import LogError

if TYPE_CHECKING:
    from collections.abc import Callable
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

    A store calls `start` when it is opened and when it goes on in a new segment. What cannot be deleted is reported to
    `on_trouble`, from a thread, and tried again the next time. The limits count more than snapshots: what they have
    deleted by the time that its snapshot is made has none.
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
        self._making: threading.Thread | None = None
        self._retiring: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_making = self._is_asked = False
        """Whether the thread that makes snapshots is there; whether it is to look, perhaps once more."""

    def start(self, directory: Path, segment_bytes: int) -> None:
        """Begin, while the last segment of the log in `directory` may grow to `segment_bytes`.

        That much is retired beforehand: while this runs, one segment more may be filled, and so the limit is exceeded
        by no more than one. Waits for retention that is under way, so that it does not become two; for no snapshot.
        """
        if self._snapshots is not None:
            with self._lock:
                self._is_asked = True
                is_making, self._is_making = self._is_making, True
            if not is_making:
                self._making = _begin("kvledger-snapshots", self._make, self._snapshots, directory)
        if self.max_bytes is not None or self.max_age_seconds is not None:
            self.wait()
            self._retiring = _begin("kvledger-retention", self._retire, directory, segment_bytes)

    def wait(self) -> None:
        """Return when nothing is being retired."""
        if self._retiring is not None:
            self._retiring.join()

    def stop(self) -> None:
        """Return when nothing is under way; a snapshot that is being made is given up."""
        if self._snapshots is not None:
            self._snapshots.stop()
        if self._making is not None:
            self._making.join()
        self.wait()

    def _make(self, snapshots: SnapshotMaker, directory: Path) -> None:
        while True:
            with self._lock:
                if not self._is_asked:
                    self._is_making = False
                    return
                self._is_asked = False
            snapshots.make(directory)

    def _retire(self, directory: Path, segment_bytes: int) -> None:
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


def _begin(name: str, target: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread
