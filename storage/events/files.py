"""Open the files of a log, and change files and directories. Frames are appended in `segments`.

A log directory may come from an untrusted source, or other users may be able to write into it. The functions of this
module therefore open only regular files in a log directory, and refuse links, pipes and devices. They check the path
before they open the file, and the descriptor afterwards, because the path may be replaced in between. The user chooses
the path of the directory, so that path may lead through links.

Every change is one call of a function of `os`, so that a test can stop the process between any two changes.
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
"""Directory mode: only the owner has access."""
_DIRECTORY: Final = 0o755
_FILE: Final = 0o644
_SAFELY: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LINK: Final = "is a symbolic link, which kvledger does not follow"
_REMEDIES: Final = {
    errno.ELOOP: "remove the link, or give the path that it leads to",
    errno.EMLINK: "copy the log directory and use the copy",
    errno.ESTALE: "find out what replaced it, and run the command again",
}
_KINDS: Final = (
    (stat.S_ISDIR, errno.EISDIR, "is a directory, not a file"),
    (stat.S_ISFIFO, errno.EINVAL, "is a named pipe, not a regular file"),
    (stat.S_ISSOCK, errno.EINVAL, "is a socket, not a regular file"),
)


class RefusedFile(OSError):
    """kvledger refuses to open a file of a log directory. The message states the reason and the remedy."""

    @property
    def remedy(self) -> str:
        """The user's remedy."""
        return _REMEDIES.get(self.errno or 0, "remove it from the log directory, or give another path")

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}; {self.remedy}"


def is_full(error: OSError) -> bool:
    """Whether a write failed because the disk, or the user's quota on it, is full."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT}


def open_for_reading(path: Path) -> int:
    """Open a regular file without waiting, and return its descriptor.

    Raises:
        RefusedFile: the path is a link, or is not a regular file.
        OSError: the file cannot be opened.
    """
    return _opened(path, os.O_RDONLY)


def open_for_writing(path: Path, flags: int, mode: int = _FILE) -> int:
    """Open a regular file for writing, and return its descriptor. With O_CREAT in `flags`, create a missing file.

    Raises the errors of `open_for_reading`, and `RefusedFile` if the file has hard links.
    """
    return _opened(path, flags, mode, is_written=True)


def open_for_locking(path: Path) -> tuple[int, bool]:
    """Open a lock file, which is created if missing. Return its descriptor, and whether it may be written to.

    A file with hard links must not be written to. It can be locked, because a lock does not change the file. Raises the
    errors of `open_for_reading`.
    """
    descriptor = _opened(path, os.O_RDWR | os.O_CREAT)
    return descriptor, os.fstat(descriptor).st_nlink <= 1


def _opened(path: Path, flags: int, mode: int = _FILE, *, is_written: bool = False) -> int:
    # Checked before, too: merely opening a pipe or a device can have an effect.
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
            reason = f"has {status.st_nlink} names (hard links), so writing would change the file under all its names"
            raise RefusedFile(errno.EMLINK, reason, str(path))
        return
    if stat.S_ISLNK(status.st_mode):
        raise refused_link(path)
    for is_kind, number, reason in _KINDS:
        if is_kind(status.st_mode):
            raise RefusedFile(number, reason, str(path))
    raise RefusedFile(errno.EINVAL, "is a device, not a regular file", str(path))


def refused_link(path: Path) -> RefusedFile:
    """Return the error for a symbolic link where a log directory was expected."""
    return RefusedFile(errno.ELOOP, _LINK, str(path))


@contextlib.contextmanager
def opened_directory(directory: Path, expected: os.stat_result) -> Iterator[int]:
    """Check that `directory` has the status `expected`, and yield a descriptor of it.

    Changes through this descriptor stay in the checked directory, even if another directory takes its name meanwhile.

    Raises:
        RefusedFile: another directory is now at the path `directory`.
        OSError: the directory cannot be opened.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not os.path.samestat(os.fstat(descriptor), expected):
            raise RefusedFile(errno.ESTALE, "was replaced by another directory meanwhile", str(directory))
        yield descriptor
    finally:
        os.close(descriptor)


def remove_in(descriptor: int, path: Path) -> None:
    """Remove the file named `path.name` from the directory of `descriptor`. Raises `OSError` with the whole path."""
    try:
        os.unlink(path.name, dir_fd=descriptor)
    except OSError as error:
        error.filename = str(path)
        raise


def trouble_with(path: Path) -> str:
    """Return why kvledger refuses to read a file, with the remedy. Empty if the file is regular or missing."""
    try:
        _check(path, path.lstat(), is_written=False)
    except RefusedFile as error:
        return str(error)
    except OSError:
        return ""
    return ""


def is_regular_file(path: Path) -> bool:
    """Whether `path` is a regular file and not a link. Raises `OSError` if the path cannot be checked."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def num_bytes_of(path: Path) -> int:
    """Return the size of a regular file in bytes; 0 if `path` is something else. Raises `OSError`."""
    status = path.lstat()
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def directories_in(directory: Path) -> list[Path]:
    """Return the directories in `directory`, sorted by name. Links are left out. Raises `OSError`."""
    with os.scandir(directory) as entries:
        return sorted(directory / entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


def links_in(directory: Path) -> list[Path]:
    """Return the symbolic links in `directory`, sorted by name. Raises `OSError`.

    A link to another entry of `directory`, such as `latest`, is left out, because the caller sees that entry anyway.
    """
    with os.scandir(directory) as entries:
        names = {entry.name: entry.is_symlink() for entry in entries}
    return [directory / name for name in sorted(names) if names[name] and not _leads_to(directory / name, names)]


def _leads_to(link: Path, names: Mapping[str, bool]) -> bool:
    """Whether `link` leads to an entry of `names` that is no link. `names` is entry → whether the entry is a link."""
    try:
        return names.get(str(link.readlink()), True) is False
    except OSError:
        return False


def read_file(path: Path) -> bytes:
    """Return the content of a regular file. Raises `OSError`."""
    with os.fdopen(open_for_reading(path), "rb") as file:
        return file.read()


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`, continuing after a short write. Raises `OSError`."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_file(path: Path, data: bytes | Iterable[bytes], *, durable: bool, exclusive: bool = False) -> None:
    """Write a new file with `data`, which may be given in parts. Raises `OSError`; a partial file may then remain.

    An existing file or link with this name, for example from before a crash, is removed first. With `exclusive`, the
    function raises `FileExistsError` instead of removing it. With `durable`, the content is synced to disk.
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
    """Append one line to a file and sync the file to disk. Create a missing file.

    If a crash left an incomplete last line, that line is ended first. Raises `OSError` if the write fails; the new line
    is then removed if possible.
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
    """Create a directory and its missing parents. Raises `OSError`.

    The path may lead through links. With `durable`, the names of the new directories are synced to disk. The umask
    restricts `mode`. By default, only the owner may write into the directories.
    """
    above = directory.absolute().parent
    if not above.exists():
        make_directory(above, durable=durable, mode=mode)
    directory.mkdir(mode=mode, exist_ok=True)
    if durable:
        sync_directory(above)


def sync_directory(directory: Path) -> None:
    """Sync the file names in `directory` to disk, but not the files' contents. Raises `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
