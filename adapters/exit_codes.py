"""Exit codes of `kvledger`; of several the gravest goes: damage, a broken rule, a divergence, a missing end."""

from __future__ import annotations

import enum
import errno
from collections.abc import Iterable
from pathlib import Path


class ExitCode(enum.IntEnum):
    """What a script can rely on."""

    SOUND = 0
    RULE_BROKEN = 1
    DAMAGED = 2
    """Also: unreadable, or written by a newer version."""
    DIVERGED = 3
    """Today's code decides otherwise than the log, or cannot fold it."""
    END_MISSING = 4
    """What is there is sound, and events are known to be missing at the end."""
    USAGE = 64
    INTERNAL_ERROR = 70
    """A mistake in kvledger itself."""
    CANNOT_WRITE = 74
    """Standard output cannot be written: a full disk."""
    TRY_AGAIN = 75
    """A stream's server cannot be reached or has no room, or not everything is shipped: the same command later."""
    REFUSED = 77
    """A stream's server refused the credentials or the request, or its certificate was refused."""
    INTERRUPTED = 130
    BROKEN_PIPE = 141


_BY_GRAVITY = (ExitCode.DAMAGED, ExitCode.RULE_BROKEN, ExitCode.DIVERGED, ExitCode.END_MISSING, ExitCode.SOUND)


_REMEDIES = {
    errno.EACCES: "run the command as a user who may read it",
    errno.EPERM: "run the command as a user who may read it",
    errno.ENOENT: "it was retired or moved meanwhile: run the command again",
    errno.ENOTDIR: "give the directory of a log",
    errno.ELOOP: "a symbolic link there leads to itself: put it right",
    errno.EIO: "the disk or the network behind it failed: copy what can be read, and read the copy",
    errno.ESTALE: "the network file system lost it: mount it again",
}


def unreadable_text(error: OSError) -> str:
    """What could not be read, why, and what to do about it."""
    name = f"{error.filename}: " if error.filename else ""
    reason = error.strerror or str(error) or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0, "put that right, or read a copy of the log")
    if error.errno == errno.ENOENT and error.filename and Path(error.filename).is_symlink():
        remedy = "it is a symbolic link to what is not there: put it right, or remove it"
    return f"{name}cannot be read ({reason}); {remedy}"


def gravest(codes: Iterable[ExitCode]) -> ExitCode:
    """The exit code of a command that read several logs; one that is not of a log's soundness goes over all."""
    found = set(codes)
    return next((code for code in (*found.difference(_BY_GRAVITY), *_BY_GRAVITY) if code in found), ExitCode.SOUND)


class CommandFailed(Exception):
    """Ends a command with a message on stderr and an exit code."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
