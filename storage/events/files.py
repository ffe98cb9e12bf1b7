"""How this store opens files to read, and changes a disk away from the hot path: whole files, and directories.

Every change is one call of `os`, never a buffered file, so that a test can stop the process between any two of them.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "append_line",
    "is_full",
    "make_directory",
    "open_for_reading",
    "read_file",
    "sync_directory",
    "write_all",
    "write_file",
]


def is_full(error: OSError) -> bool:
    """Whether a write failed because the disk, or the user's quota on it, is full."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT}


def open_for_reading(path: Path) -> int:
    """Return a descriptor of a regular file. Never waits, as opening a pipe would for its writer. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return descriptor


def read_file(path: Path) -> bytes:
    """Return all that is in a regular file. Raises `OSError`."""
    with os.fdopen(open_for_reading(path), "rb") as file:
        return file.read()


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`; after a short write the rest either fits after all, or says why not. Raises `OSError`."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_file(path: Path, data: bytes, *, durable: bool, exclusive: bool = False) -> None:
    """Write a file that holds `data`, in place of any that is there. Raises `OSError`, and may leave a part behind.

    With `exclusive`, a file that is there is `FileExistsError`.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if exclusive else os.O_TRUNC)
    descriptor = os.open(path, flags, 0o644)
    try:
        write_all(descriptor, data)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, line: bytes) -> None:
    """Append one line to a file, on disk before this returns.

    A line that a crash had left half written is ended first, so that it spoils only itself. Raises `OSError`; what was
    written until then is removed, where that can be done.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        try:
            write_all(descriptor, (b"\n" if is_torn else b"") + line + b"\n")
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
    sync_directory(path.parent)


def make_directory(directory: Path, *, durable: bool) -> None:
    """Make a directory and those above it, where they are not there. `durable`: with their names. Raises `OSError`."""
    above = directory.absolute().parent
    if not above.exists():
        make_directory(above, durable=durable)
    directory.mkdir(exist_ok=True)
    if durable:
        sync_directory(above)


def sync_directory(directory: Path) -> None:
    """Return when the names in `directory` are on disk. Raises `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
