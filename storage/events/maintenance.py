"""A writer's work in threads when its log begins a new segment: compression, snapshots, retention.

The writer waits only for a retention pass that is still running. Must not know how snapshots are made.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final, Protocol

from kvledger.storage.events.compressed import compress_segment
from kvledger.storage.events.files import is_full
from kvledger.storage.events.retention import SnapshotWait, Trouble, free_bytes, ignore, retire_logs
from kvledger.storage.events.segment_file import segment_paths
from kvledger.storage.events.store import LogDamaged, LogError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

__all__ = ["MAX_EXCESS_SEGMENTS", "MIN_LOG_SEGMENTS", "Maintenance", "SnapshotMaker"]

MIN_LOG_SEGMENTS: Final = 3
"""Segments that a log's size limit must allow for a reader to begin with one: the one being written, the one before it
(the snapshot of the former is made from it), and the size of one for the snapshots of both."""
MAX_EXCESS_SEGMENTS: Final = 4
"""Segments by which logs may exceed their size limit to wait for a snapshot: three that wait and one that fills. Even
at the smallest limit, a snapshot may be late by the time in which three segments fill."""
_MAX_EXCESS_SECONDS: Final = 3600.0


class SnapshotMaker(Protocol):
    """Makes the missing snapshots of a log."""

    def make(self, directory: Path) -> None:
        """Return when each segment of the log in `directory` has a snapshot or cannot have one. Never raises."""

    def stop(self) -> None:
        """Make `make` return soon, from any thread, and create no more snapshots."""


class Maintenance:
    """Maintains the log of a store, and all logs next to it.

    The store calls `start` when it opens and with each new segment. One thread compresses closed segments and then has
    snapshots made; another retires segments. Failures go to `on_trouble`, from a thread, and are tried again after the
    next `start`.

    If snapshots are made, a segment stays until the next one has its snapshot, as long as the logs exceed `max_bytes`
    by at most `MAX_EXCESS_SEGMENTS` segments and `max_age_seconds` by at most an hour. Missing snapshots of closed logs
    are made first.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        max_age_seconds: float | None = None,
        *,
        snapshots: SnapshotMaker | None = None,
        on_trouble: Trouble = ignore,
    ) -> None:
        """Set the limits for all logs in the directory; None: no limit."""
        self.max_bytes: Final = max_bytes
        self.max_age_seconds: Final = max_age_seconds
        self._snapshots = snapshots
        self._on_trouble = on_trouble
        self._in_use: Path | None = None
        self._segment_bytes = 0
        self._compressed_to = ""
        """Name of the last segment that is compressed or stays uncompressed."""
        self._making: threading.Thread | None = None
        self._retiring: threading.Thread | None = None
        self._lock = threading.Lock()
        self._one_pass = threading.Lock()
        """Held while segments are deleted or replaced."""
        self._is_making = self._is_asked = self._is_stopped = False
        """Whether the thread for compression and snapshots runs, has a pass to do, and must stop."""

    def start(self, in_use: Path, segment_bytes: int) -> None:
        """Start a pass. `in_use` is the log's last segment, which may grow to `segment_bytes`.

        Retention frees `segment_bytes` in advance. One more segment may fill meanwhile, so logs exceed the limit by at
        most one segment. Waits for a running retention pass, so that there are never two.
        """
        self._in_use, self._segment_bytes = in_use, segment_bytes
        with self._lock:
            self._is_asked = True
            is_making, self._is_making = self._is_making, True
        if not is_making:
            self._making = _begin("kvledger-maintenance", self._make)
        if self._has_limits:
            self.wait()
            self._retiring = _begin("kvledger-retention", self._retire, in_use.parent)

    def disk_is_full(self) -> None:
        """Retire segments that only wait for a snapshot: a full disk has no room for one. Returns at once."""
        if self._has_limits and self._in_use is not None and not (self._retiring and self._retiring.is_alive()):
            self._retiring = _begin("kvledger-retention", self._retire, self._in_use.parent, waits=False)

    def wait(self) -> None:
        """Wait until retention has finished."""
        if self._retiring is not None:
            self._retiring.join()

    def stop(self) -> None:
        """Wait for both threads; a running compression or snapshot is abandoned."""
        self._is_stopped = True
        if self._snapshots is not None:
            self._snapshots.stop()
        if self._making is not None:
            self._making.join()
        self.wait()

    @property
    def _has_limits(self) -> bool:
        return self.max_bytes is not None or self.max_age_seconds is not None

    def _make(self) -> None:
        while True:
            with self._lock:
                if not self._is_asked or self._in_use is None:
                    self._is_making = False
                    return
                self._is_asked, in_use = False, self._in_use
            self._compress_before(in_use)
            if self._snapshots is not None:
                self._snapshots.make(in_use.parent)
                if self._has_limits:
                    self._retire_waiting(self._snapshots, in_use.parent)

    def _compress_before(self, in_use: Path) -> None:
        """Compress the closed segments. A damaged one stays unchanged: it is evidence, and the reader reports it."""
        try:
            if free_bytes(in_use.parent) < 2 * self._segment_bytes:
                return  # the rest belongs to the segment in use
            for segment in segment_paths(in_use.parent):
                if self._compressed_to < segment.name < in_use.name and not self._is_stopped:
                    with contextlib.suppress(LogDamaged, FileNotFoundError):  # or retired meanwhile
                        compress_segment(segment, replacing=self._one_pass, goes_on=lambda: not self._is_stopped)
                    self._compressed_to = segment.name
        except OSError as error:
            if in_use.exists() and not is_full(error):  # the writer reports a full disk
                self._on_trouble(error)

    def _retire_waiting(self, snapshots: SnapshotMaker, directory: Path) -> None:
        """Retire segments that waited for snapshots, and make the snapshots of closed logs."""
        given_up: set[Path] = set()
        while not self._is_stopped:
            waits_for = self._retire(directory, given_up)
            if waits_for is None or waits_for.name == directory.name or waits_for in given_up:
                return
            snapshots.make(waits_for)
            given_up.add(waits_for)

    def _retire(self, directory: Path, given_up: Collection[Path] = (), *, waits: bool = True) -> Path | None:
        """Retire; return the log whose snapshot retention waits for, if any."""
        segment_bytes = self._segment_bytes
        max_bytes = None if self.max_bytes is None else max(0, self.max_bytes - segment_bytes)
        wait = None
        if waits and self._snapshots is not None:
            wait = SnapshotWait((MAX_EXCESS_SEGMENTS - 1) * segment_bytes, _MAX_EXCESS_SECONDS, given_up)
        try:
            with self._one_pass:
                retire_logs(
                    directory.parent,
                    max_bytes=max_bytes,
                    max_age_seconds=self.max_age_seconds,
                    in_use=directory,
                    on_trouble=self._on_trouble,
                    wait=wait,
                )
        except (OSError, LogError) as error:
            if directory.parent.exists():  # else no log is left
                self._on_trouble(error)
        return None if wait is None else wait.waits_for


def _begin(name: str, target: Callable[..., object], *args: object, **options: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, kwargs=options, name=name, daemon=True)
    thread.start()
    return thread
