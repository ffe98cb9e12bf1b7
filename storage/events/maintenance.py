"""What a writer leaves to threads when its log goes on in a new segment: compression, snapshots, retention.

Nothing here keeps the writer waiting but a pass of retention that is still under way. Who makes snapshots, and how, is
the business of whoever gives the maker.
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
"""Segments that the size limit of a log has to hold, for a reader to find one to begin with: the one that is being
written, the one before it, from which its snapshot is made, and one for the snapshots of both."""
MAX_EXCESS_SEGMENTS: Final = 4
"""Segments by which logs may exceed their size limit while a snapshot is waited for: three that wait and the one that
is filled meanwhile. With `MIN_LOG_SEGMENTS` a snapshot may be late by the time in which three segments are filled."""
_MAX_EXCESS_SECONDS: Final = 3600.0


class SnapshotMaker(Protocol):
    """Makes the snapshots that a log lacks."""

    def make(self, directory: Path) -> None:
        """Return when the segments that the log in `directory` has now have theirs, or cannot have. Never raises."""

    def stop(self) -> None:
        """Have `make` return soon, from whatever thread it was called; it makes nothing any more."""


class Maintenance:
    """Of the log that a store writes, and of all logs next to it.

    A store calls `start` when it is opened and when it goes on in a new segment. One thread compresses closed segments
    and then has the snapshots made; another one retires. What cannot be compressed or deleted is reported to
    `on_trouble`, from a thread, and tried again the next time.

    Where snapshots are made, a segment stays until the next one has its snapshot, as long as the logs take no more than
    `MAX_EXCESS_SEGMENTS` segments over `max_bytes`, and for at most an hour over `max_age_seconds`. A snapshot that a
    closed log lacks is made first.
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
        self._in_use: Path | None = None
        self._segment_bytes = 0
        self._compressed_to = ""
        """The name of the last segment that is compressed, or stays as it is for good."""
        self._making: threading.Thread | None = None
        self._retiring: threading.Thread | None = None
        self._lock = threading.Lock()
        self._one_pass = threading.Lock()
        """Held while segments are deleted, or replaced by their compressed form."""
        self._is_making = self._is_asked = self._is_stopped = False
        """Whether the thread that compresses and makes snapshots is there; whether it is to look, perhaps once more."""

    def start(self, in_use: Path, segment_bytes: int) -> None:
        """Begin. `in_use` is the log's last segment, which may grow to `segment_bytes`; those before it are closed.

        That much is retired beforehand: while this runs, one segment more may be filled, and so the limit is exceeded
        by no more than one. Waits for retention that is under way, so that it does not become two; for nothing else.
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
        """Retire what is over the limits and only waits for a snapshot: there is no room for one. Returns at once."""
        if self._has_limits and self._in_use is not None and not (self._retiring and self._retiring.is_alive()):
            self._retiring = _begin("kvledger-retention", self._retire, self._in_use.parent, waits=False)

    def wait(self) -> None:
        """Return when nothing is being retired."""
        if self._retiring is not None:
            self._retiring.join()

    def stop(self) -> None:
        """Return when nothing is under way; a segment that is being compressed, or a snapshot, is given up."""
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
        """Compress the closed segments. One that has damage stays as it is: the reader names it, it is evidence."""
        try:
            if free_bytes(in_use.parent) < 2 * self._segment_bytes:
                return  # what room there is belongs to the segment in use
            for segment in segment_paths(in_use.parent):
                if self._compressed_to < segment.name < in_use.name and not self._is_stopped:
                    with contextlib.suppress(LogDamaged, FileNotFoundError):  # or retired meanwhile
                        compress_segment(segment, replacing=self._one_pass, goes_on=lambda: not self._is_stopped)
                    self._compressed_to = segment.name
        except OSError as error:
            if in_use.exists() and not is_full(error):  # a full disk is heard of from the writer
                self._on_trouble(error)

    def _retire_waiting(self, snapshots: SnapshotMaker, directory: Path) -> None:
        """Retire what waited for snapshots; make those that closed logs lack."""
        given_up: set[Path] = set()
        while not self._is_stopped:
            waits_for = self._retire(directory, given_up)
            if waits_for is None or waits_for.name == directory.name or waits_for in given_up:
                return
            snapshots.make(waits_for)
            given_up.add(waits_for)

    def _retire(self, directory: Path, given_up: Collection[Path] = (), *, waits: bool = True) -> Path | None:
        """Retire; return the log whose snapshot is waited for, if any."""
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
            if directory.parent.exists():  # else no log is left that takes room
                self._on_trouble(error)
        return None if wait is None else wait.waits_for


def _begin(name: str, target: Callable[..., object], *args: object, **options: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, kwargs=options, name=name, daemon=True)
    thread.start()
    return thread
