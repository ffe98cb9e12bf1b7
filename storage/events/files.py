"""How this store opens files, and changes a disk away from the hot path: whole files, and directories.

A log directory may come from elsewhere, and others may be able to write there. So every file in it is opened here, and
is a regular file: no link is followed, no pipe is waited for, no device is opened. The descriptor is checked, because
what a name leads to may change between a look and the opening. The path of the directory is the user's own choice and
may lead through links.

Every change is one call of `os`, never a buffered file, so that a test can stop the process between any two of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

__all__ = [
    "PRIVATE_DIRECTORY",
    "RefusedFile",
    "append_line",
    "directories_in",
    "is_full",
    "is_regular_file",
    "links_in",
    "make_directory",
    "num_bytes_of",
    "open_for_locking",
    "open_for_reading",
    "open_for_writing",
    "opened_directory",
    "read_file",
    "refused_link",
    "remove_in",
    "sync_directory",
    "trouble_with",
    "write_all",
    "write_file",
]

PRIVATE_DIRECTORY: Final = 0o700
"""Mode of a directory for its owner only."""
_DIRECTORY: Final = 0o755
_FILE: Final = 0o644
_SAFELY: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LINK: Final = "is a symbolic link, which kvledger does not follow"
_REMEDIES: Final = {
    errno.ELOOP: "remove the link, or give what it leads to",
    errno.EMLINK: "copy the log directory, and use the copy",
    errno.ESTALE: "find out what replaces it, and run the command again",
}
_KINDS: Final = (
    (stat.S_ISDIR, errno.EISDIR, "is a directory and no file"),
    (stat.S_ISFIFO, errno.EINVAL, "is a named pipe and no regular file"),
    (stat.S_ISSOCK, errno.EINVAL, "is a socket and no regular file"),
)


class RefusedFile(OSError):
    """A name in a log directory leads to something that kvledger does not open. The message has reason and remedy."""

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return _REMEDIES.get(self.errno or 0, "remove it from the log directory, or give another path")

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}; {self.remedy}"


def is_full(error: OSError) -> bool:
    """Whether a write failed because the disk, or the user's quota on it, is full."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT}


def open_for_reading(path: Path) -> int:
    """Return a descriptor of a regular file. Never waits, as opening a pipe would for its writer.

    Raises:
        RefusedFile: it is a link or no regular file.
        OSError: it cannot be opened.

    """
    return _opened(path, os.O_RDONLY)


def open_for_writing(path: Path, flags: int, mode: int = _FILE) -> int:
    """Return a descriptor of a regular file with one name; with O_CREAT in `flags` one that is missing is made.

    Raises:
        RefusedFile: it is a link or no regular file, or a hard link gives it another name.
        OSError: it cannot be opened.

    """
    return _opened(path, flags, mode, is_written=True)


def open_for_locking(path: Path) -> tuple[int, bool]:
    """Return a descriptor of a regular file, which is made if it is missing, and whether that may be written to.

    It may not be if a hard link gives it another name. A lock changes nothing there.

    Raises:
        RefusedFile: it is a link or no regular file.
        OSError: it cannot be opened.

    """
    descriptor = _opened(path, os.O_RDWR | os.O_CREAT)
    return descriptor, os.fstat(descriptor).st_nlink <= 1


def _opened(path: Path, flags: int, mode: int = _FILE, *, is_written: bool = False) -> int:
    # Opening alone can have an effect on a pipe or a device, so there is a look before and one after.
    with contextlib.suppress(FileNotFoundError):
        _check(path, path.lstat(), is_written=is_written)
    descriptor = os.open(path, flags | _SAFELY, mode)
    try:
        _check(path, os.fstat(descriptor), is_written=is_written)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: Path, status: os.stat_result, *, is_written: bool) -> None:
    if stat.S_ISREG(status.st_mode):
        if is_written and status.st_nlink > 1:
            reason = f"has {status.st_nlink} names (hard links), and writing would change the file under all of them"
            raise RefusedFile(errno.EMLINK, reason, str(path))
        return
    if stat.S_ISLNK(status.st_mode):
        raise refused_link(path)
    for is_kind, number, reason in _KINDS:
        if is_kind(status.st_mode):
            raise RefusedFile(number, reason, str(path))
    raise RefusedFile(errno.EINVAL, "is a device and no regular file", str(path))


def refused_link(path: Path) -> RefusedFile:
    """Return the error for a link where a log was looked for."""
    return RefusedFile(errno.ELOOP, _LINK, str(path))


@contextlib.contextmanager
def opened_directory(directory: Path, expected: os.stat_result) -> Iterator[int]:
    """Yield a descriptor of a directory, for changes that must hit this directory whatever its name leads to by now.

    Raises:
        RefusedFile: it is not the directory that `expected` is the status of.
        OSError: it cannot be opened.

    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not os.path.samestat(os.fstat(descriptor), expected):
            raise RefusedFile(errno.ESTALE, "was replaced by another directory meanwhile", str(directory))
        yield descriptor
    finally:
        os.close(descriptor)


def remove_in(descriptor: int, path: Path) -> None:
    """Remove a file from the directory that `descriptor` is one of; an error names the whole path. Raises `OSError`."""
    try:
        os.unlink(path.name, dir_fd=descriptor)
    except OSError as error:
        error.filename = str(path)
        raise


def trouble_with(path: Path) -> str:
    """Why kvledger does not read a file, with the remedy; empty if it is a regular file, or missing."""
    try:
        _check(path, path.lstat(), is_written=False)
    except RefusedFile as error:
        return str(error)
    except OSError:
        return ""
    return ""


def is_regular_file(path: Path) -> bool:
    """Whether it is a regular file itself, and no link to one. Raises `OSError` if it cannot be looked at."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def num_bytes_of(path: Path) -> int:
    """Size of a regular file in bytes; 0 of anything else. Raises `OSError`."""
    status = path.lstat()
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def directories_in(directory: Path) -> list[Path]:
    """Return the directories in `directory` by name, without links to directories. Raises `OSError`."""
    with os.scandir(directory) as entries:
        return sorted(directory / entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


def links_in(directory: Path) -> list[Path]:
    """Return the symbolic links in `directory` by name. Raises `OSError`.

    Without those to a neighbour, such as `latest`: what they lead to is in the directory anyway.
    """
    with os.scandir(directory) as entries:
        names = {entry.name: entry.is_symlink() for entry in entries}
    return [directory / name for name in sorted(names) if names[name] and not _leads_to(directory / name, names)]


def _leads_to(link: Path, names: Mapping[str, bool]) -> bool:
    """Whether a link leads to one of these names in its directory, which is no link itself."""
    try:
        return names.get(str(link.readlink()), True) is False
    except OSError:
        return False


def read_file(path: Path) -> bytes:
    """Return all that is in a regular file. Raises `OSError`."""
    with os.fdopen(open_for_reading(path), "rb") as file:
        return file.read()


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`; after a short write the rest either fits after all, or says why not. Raises `OSError`."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_file(path: Path, data: bytes | Iterable[bytes], *, durable: bool, exclusive: bool = False) -> None:
    """Write a new file that holds `data`, which may come in parts. Raises `OSError`, and may leave a part behind.

    What has the name already, such as a file that a crash has left, is removed first, and a link is not followed. With
    `exclusive` it stays, and the error is `FileExistsError`.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY
    try:
        descriptor = os.open(path, flags, _FILE)
    except FileExistsError:
        if exclusive:
            raise
        path.unlink()
        descriptor = os.open(path, flags, _FILE)
    try:
        for part in (data,) if isinstance(data, bytes) else data:
            write_all(descriptor, part)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, line: bytes) -> None:
    """Append one line to a file, on disk before this returns.

    A line that a crash had left half written is ended first, so that it spoils only itself. Raises `OSError`; what was
    written until then is removed, where that can be done.
    """
    descriptor = open_for_writing(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
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


def make_directory(directory: Path, *, durable: bool, mode: int = _DIRECTORY) -> None:
    """Make a directory and those above it, where they are missing. Raises `OSError`.

    Args:
        directory: the path; it may lead through links.
        durable: whether the new names are on disk when this returns.
        mode: of each directory that is made, less the umask. By default only the owner may write there.

    """
    above = directory.absolute().parent
    if not above.exists():
        make_directory(above, durable=durable, mode=mode)
    directory.mkdir(mode=mode, exist_ok=True)
    if durable:
        sync_directory(above)


def sync_directory(directory: Path) -> None:
    """Return when the names in `directory` are on disk. Raises `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
