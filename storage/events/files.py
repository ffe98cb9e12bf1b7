"""How this store changes a disk, away from the hot path: whole files, and directories.

Every change is one call of `os`, never a buffered file, so that a test can stop the process between any two of them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["append_line", "make_directory", "sync_directory", "write_all", "write_file"]


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
    written until then is taken back, where that can be done.
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
