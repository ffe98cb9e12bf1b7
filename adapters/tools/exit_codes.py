"""Exit codes of `kvledger`, and which of several a command returns: the gravest one.

Codes below 64 are verdicts on a log, the others speak of the command.
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType


class ExitCode(enum.IntEnum):
    """What a script can rely on."""

    SOUND = 0
    RULE_BROKEN = 1
    DAMAGED = 2
    DIVERGED = 3
    END_MISSING = 4
    NOTHING_CHECKED = 5
    EXTENSION_STOPPED = 6
    NOT_VERIFIED = 7
    USAGE = 64
    INTERNAL_ERROR = 70
    CANNOT_WRITE = 74
    TRY_AGAIN = 75
    REFUSED = 77
    INTERRUPTED = 130
    BROKEN_PIPE = 141


OF_EVERY_COMMAND: Mapping[ExitCode, str] = MappingProxyType(
    {
        ExitCode.USAGE: "wrong usage: arguments, a path without a log, an unknown or ambiguous request",
        ExitCode.INTERNAL_ERROR: "a mistake in kvledger itself, and no judgement; the message says how to report it",
        ExitCode.CANNOT_WRITE: "the output cannot be written, as on a full disk",
        ExitCode.TRY_AGAIN: "a stream's server cannot be reached or has no room: try again later",
        ExitCode.REFUSED: "a stream's server, its certificate or the credentials were refused, or the stream "
        "is missing, or an extra of kvledger that the command needs",
        ExitCode.INTERRUPTED: "interrupted",
        ExitCode.BROKEN_PIPE: "whoever read the output went away",
    }
)
"""What a code means that any command may end with; the others mean what a command says of them."""


VERDICTS: Mapping[ExitCode, str] = MappingProxyType(
    {
        ExitCode.DAMAGED: "damaged, or unreadable",
        ExitCode.RULE_BROKEN: "a rule is broken",
        ExitCode.DIVERGED: "today's code decides differently than the log says, or cannot fold it",
        ExitCode.NOT_VERIFIED: "not verified, or in part: a process was killed twice, or --lenient skipped events",
        ExitCode.NOTHING_CHECKED: "nothing could be checked: no event, those before missing, or a worker's calls alone",
        ExitCode.END_MISSING: "what is there is sound, and events are known to be missing at the end",
        ExitCode.EXTENSION_STOPPED: "sound, but an extension was stopped, so its rules were not checked to the end",
        ExitCode.SOUND: "sound, as far as the log goes",
    }
)
"""What a verdict means, the gravest first."""
_BY_GRAVITY = tuple(VERDICTS)


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
    if hasattr(error, "remedy"):  # `RefusedFile` has all three in its text
        return str(error)
    name = f"{error.filename}: " if error.filename else ""
    reason = error.strerror or str(error) or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0, "put that right, or read a copy of the log")
    if error.errno == errno.ENOENT and error.filename and Path(error.filename).is_symlink():
        remedy = "it is a symbolic link to what is not there: put it right, or remove it"
    return f"{name}cannot be read ({reason}); {remedy}"


def gravest(codes: Iterable[ExitCode]) -> ExitCode:
    """The exit code of a command that read several logs; a code that is no verdict goes over all verdicts."""
    found = set(codes)
    return next((code for code in (*found.difference(_BY_GRAVITY), *_BY_GRAVITY) if code in found), ExitCode.SOUND)


class CommandFailed(Exception):
    """Ends a command with a message on stderr and an exit code."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
