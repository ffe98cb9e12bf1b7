"""Syncs written data to disk (`fdatasync`) in a thread, so that most appends do not wait for a disk."""

from __future__ import annotations

import os
import threading

__all__ = ["GroupSync"]


class GroupSync:
    """Syncs one file descriptor after writes, at most once every `interval_ms`.

    If a sync in the thread fails, the next call of `check` or `sync` raises the error, because the kernel may have
    dropped data that was not synced.
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
        """Tell the thread that something was written and must be synced."""
        if not self._written.is_set():
            self._written.set()

    def check(self) -> None:
        """Raise the `OSError` of a sync in the thread that failed since the previous check."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def sync(self) -> None:
        """Sync all bytes written so far to disk, in the caller's thread. Raises `OSError`."""
        self._written.clear()
        with self._lock:
            self.check()
            os.fdatasync(self._descriptor)

    def switch(self, descriptor: int) -> None:
        """Sync another file from now on. The caller has synced the previous file."""
        with self._lock:
            self._descriptor = descriptor

    def stop(self) -> None:
        """End the thread and wait for it. Afterwards the thread does not use the descriptor any more."""
        self._stopping.set()
        self._written.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._written.wait()
            # Cleared first: a write during the sync asks for another one.
            self._written.clear()
            if self._stopping.is_set():
                return
            with self._lock:
                try:
                    os.fdatasync(self._descriptor)
                except OSError as error:
                    self._error = error
            self._stopping.wait(self._interval_seconds)
