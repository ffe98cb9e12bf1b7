"""Output of commands, to stdout or to a file. A file is written completely or not at all.

If the name of the file ends in `.gz`, the file is compressed.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, cast

from kvledger.adapters.tools.exit_codes import CommandFailed

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


@contextlib.contextmanager
def open_target(path: Path | None, *, overwrite: bool = False, allow_terminal: bool = False) -> Iterator[IO[bytes]]:
    """Yield the file at `path`, to write to it. Yield stdout if `path` is None.

    An existing file is replaced only if the context ends without an error.

    Raises:
        CommandFailed: the file exists and `overwrite` is false, the file cannot be written, or stdout is a terminal and
            `allow_terminal` is false.
    """
    if path is None:
        if sys.stdout.isatty() and not allow_terminal:
            raise CommandFailed("this output is not for a terminal; name a file with -o, or pipe the output elsewhere")
        yield sys.stdout.buffer
        return
    _check(path, overwrite=overwrite)
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise CommandFailed(f"{path}: {error.strerror}; name a file in a folder that can be written") from error
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if path.suffix == ".gz":
                with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0) as compressed:
                    yield cast("BinaryIO", compressed)
            else:
                yield file
            file.flush()
            os.fsync(file.fileno())
        _check(path, overwrite=overwrite)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise CommandFailed(f"{path} cannot be written: {error.strerror}; nothing was changed") from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _check(path: Path, *, overwrite: bool) -> None:
    if path.is_dir():
        raise CommandFailed(f"{path} is a folder; name a file in it")
    if path.exists() and not overwrite:
        raise CommandFailed(f"{path} exists already; name another file, or overwrite this file with --force")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
