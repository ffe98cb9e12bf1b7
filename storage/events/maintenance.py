"""Threads that run when a log begins a new segment: they compress, make snapshots and retire segments.

The writer waits for a thread only if the previous retention pass has not finished. This module must not know how
snapshots are made.
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
"""Smallest size limit of logs, in segments. Below it, a reader might find no segment with a snapshot to begin with.

The limit has room for the segment being written and for the one before it, which is needed to make the snapshot of
the segment being written. The size of a third segment is for the snapshots of both."""
MAX_EXCESS_SEGMENTS: Final = 4
"""Segments by which logs may exceed their size limit while retention waits for a snapshot.

Three of these segments wait, and the writer fills the fourth. Even at the smallest size limit, a snapshot may therefore
be late by the time in which the writer fills three segments."""
_MAX_EXCESS_SECONDS: Final = 3600.0


class SnapshotMaker(Protocol):
    """Makes the missing snapshots of a log."""

    def make(self, directory: Path) -> None:
        """Make the missing snapshots of the log in `directory`. Leave out those that cannot be made. Never raises.

        Returns when the snapshots are made.
        """

    def stop(self) -> None:
        """Let a running `make` return soon, and make no more snapshots. May be called from any thread."""


class Maintenance:
    """Maintains the log of a store, and all logs in the same directory of logs.

    The store calls `start` when it opens and with each new segment. One thread compresses closed segments and then
    calls `snapshots`. Another thread retires segments. A thread reports its failures to `on_trouble` and tries again
    after the next `start`.

    With `snapshots`, retention keeps a segment until the next segment has its snapshot. Retention stops waiting for the
    snapshot before the logs exceed `max_bytes` by more than `MAX_EXCESS_SEGMENTS` segments, or when the segment exceeds
    `max_age_seconds` by more than an hour. If retention waits for a snapshot of a closed log, `snapshots` makes that
    log's snapshots.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        max_age_seconds: float | None = None,
        *,
        snapshots: SnapshotMaker | None = None,
        on_trouble: Trouble = ignore,
    ) -> None:
        """Set the limits for all logs in the directory of logs together; None: no limit."""
        self.max_bytes: Final = max_bytes
        self.max_age_seconds: Final = max_age_seconds
        self._snapshots = snapshots
        self._on_trouble = on_trouble
        self._in_use: Path | None = None
        self._segment_bytes = 0
        self._compressed_to = ""
        """Name of the newest segment that compression has finished with; it may have stayed uncompressed."""
        self._making: threading.Thread | None = None
        self._retiring: threading.Thread | None = None
        self._lock = threading.Lock()
        self._one_pass = threading.Lock()
        """Held while a thread deletes or replaces segments."""
        self._is_making = self._is_asked = self._is_stopped = False
        """Whether the thread for compression and snapshots is running, has another pass to do, or was told to stop."""

    def start(self, in_use: Path, segment_bytes: int) -> None:
        """Start a pass of both threads. `in_use` is the log's last segment, which may grow to `segment_bytes`.

        Retention keeps the logs `segment_bytes` below the size limit, as room for the new segment. Another segment may
        fill before retention has finished, so the logs exceed the size limit by at most one segment. If a retention
        pass is running, this call first waits for it.
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
        """Retire segments without waiting for snapshots, because a full disk has no room for a snapshot.

        Retention runs in a thread, so the call returns at once. It does nothing if a retention pass is running.
        """
        if self._has_limits and self._in_use is not None and not (self._retiring and self._retiring.is_alive()):
            self._retiring = _begin("kvledger-retention", self._retire, self._in_use.parent, waits=False)

    def wait(self) -> None:
        """Wait until a running retention pass has finished."""
        if self._retiring is not None:
            self._retiring.join()

    def stop(self) -> None:
        """End both threads and wait for them. A compression or a snapshot that is not finished is abandoned."""
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
        """Compress the segments before `in_use`. Leave a damaged segment unchanged as evidence; readers report it."""
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
        """Retire segments that had to wait for a snapshot. Make the snapshots of closed logs that retention needs."""
        given_up: set[Path] = set()
        while not self._is_stopped:
            waits_for = self._retire(directory, given_up)
            if waits_for is None or waits_for.name == directory.name or waits_for in given_up:
                return
            snapshots.make(waits_for)
            given_up.add(waits_for)

    def _retire(self, directory: Path, given_up: Collection[Path] = (), *, waits: bool = True) -> Path | None:
        """Retire segments. If retention waits for a log's snapshot, return the log's directory, else None.

        `given_up` has the directories of logs whose snapshots cannot be made. Without `waits`, retention waits for no
        snapshot.
        """
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
