"""The advisory lock of a log's one writer. The kernel releases the lock when the process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING

from kvledger.storage.events.files import is_full, open_for_locking, read_file
from kvledger.storage.events.store import LogLocked

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LOCK_NAME", "lock_directory", "locked", "unlock"]

LOCK_NAME = "writer.lock"
_ATTEMPTS = 5
_PAUSE_SECONDS = 0.002
_MAX_DIGITS = 10
_held: set[int] = set()
"""Descriptors of the locks that this process holds.

A forked child closes them, because it may outlive the writer. The log would otherwise seem to be written as long as the
child runs. Closing a descriptor in the child does not release the writer's lock."""


def _close_inherited() -> None:
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_close_inherited)


def lock_directory(directory: Path) -> int:
    """Lock the log in `directory` for this process; return the descriptor that holds the lock until `unlock`.

    Raises:
        LogLocked: another writer holds the lock. The message names the writer's pid.
        RefusedFile: the lock file is a link or not a regular file.
        OSError: the directory cannot be written, or its file system has no locks.
    """
    descriptor, may_write = open_for_locking(directory / LOCK_NAME)
    try:
        _lock(descriptor)
        if may_write:
            _name_writer(descriptor)
    except BlockingIOError:
        os.close(descriptor)
        raise locked(directory) from None
    except BaseException:
        os.close(descriptor)
        raise
    _held.add(descriptor)
    return descriptor


def locked(directory: Path) -> LogLocked:
    """Return the error for a log that another process writes, with that process's pid if the lock file has it."""
    pid = "unknown"
    with contextlib.suppress(OSError):
        named = read_file(directory / LOCK_NAME).strip()
        pid = named.decode() if named.isdigit() and len(named) <= _MAX_DIGITS else pid
    return LogLocked(
        f"{directory}: the log is being written by pid {pid}; wait until that process has ended, or only read the log"
    )


def unlock(descriptor: int) -> None:
    """Release a lock. Does nothing if the lock is released already."""
    if descriptor in _held:
        _held.discard(descriptor)
        os.close(descriptor)


def _name_writer(descriptor: int) -> None:
    """Write this process's pid into the lock file. On a full disk, this may fail; the file then has no pid."""
    try:
        os.pwrite(descriptor, f"{os.getpid():<10}\n".encode(), 0)
    except OSError as error:
        if not is_full(error):
            raise


def _lock(descriptor: int) -> None:
    """Take the lock. Retries, because `is_being_written` in another process takes the lock for a moment."""
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_PAUSE_SECONDS)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
