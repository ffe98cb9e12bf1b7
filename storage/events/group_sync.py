"""Grouped `fdatasync` in a thread, so that the writer never waits for a disk. Knows a file descriptor, and no frame."""

from __future__ import annotations

import os
import threading

__all__ = ["GroupSync"]


class GroupSync:
    """Syncs one file descriptor at most once every `interval_ms`, and only after it was written to.

    A sync that failed in the thread is kept, and raised by the next `check` or `sync`: after it the kernel may have
    dropped the unsynced pages, so it must not pass unseen.
    """

    def __init__(self, descriptor: int, interval_ms: float) -> None:
        """Start the thread."""
        self._descriptor = descriptor
        self._interval_seconds = interval_ms / 1000
        self._written = threading.Event()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="kvledger-group-sync", daemon=True)
        self._thread.start()

    def note_written(self) -> None:
        """Have the thread sync what was just written."""
        if not self._written.is_set():
            self._written.set()

    def check(self) -> None:
        """Raise the `OSError` of a sync that failed since the last check."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def sync(self) -> None:
        """Return when all that was written is on disk. Raises `OSError`."""
        self._written.clear()
        with self._lock:
            self.check()
            os.fdatasync(self._descriptor)

    def switch(self, descriptor: int) -> None:
        """Watch another file from now on; the caller has synced the one before."""
        with self._lock:
            self._descriptor = descriptor

    def stop(self) -> None:
        """End the thread; it lets go of the descriptor before this returns."""
        self._stopping.set()
        self._written.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._written.wait()
            # Cleared before the sync: a write that comes during it asks for another one.
            self._written.clear()
            if self._stopping.is_set():
                return
            with self._lock:
                try:
                    os.fdatasync(self._descriptor)
                except OSError as error:
                    self._error = error
            self._stopping.wait(self._interval_seconds)
