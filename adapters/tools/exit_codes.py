"""Exit codes of `kvledger`. If several apply, the command returns the most severe one.

Codes below 64 are about a log. Codes from 64 on are about the command itself, such as wrong usage.
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType


class ExitCode(enum.IntEnum):
    """Exit codes, stable for scripts."""

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
        ExitCode.USAGE: "wrong usage, such as a wrong argument, a path without a log, or an unknown or ambiguous "
        "request",
        ExitCode.INTERNAL_ERROR: "a bug in kvledger, so there is no result; the message explains how to report the bug",
        ExitCode.CANNOT_WRITE: "the output cannot be written, for example because the disk is full",
        ExitCode.TRY_AGAIN: "the server of a NATS stream cannot be reached or has no room; try again later",
        ExitCode.REFUSED: "the address, certificate or credentials of a NATS stream are refused, the stream does not "
        "exist, or an optional dependency is not installed",
        ExitCode.INTERRUPTED: "interrupted",
        ExitCode.BROKEN_PIPE: "the program that reads the output through a pipe has ended",
    }
)
"""Exit code → meaning, for codes of every command. Each command lists its other codes itself."""


VERDICTS: Mapping[ExitCode, str] = MappingProxyType(
    {
        ExitCode.DAMAGED: "damaged or unreadable",
        ExitCode.RULE_BROKEN: "a rule is broken",
        ExitCode.DIVERGED: "today's code makes other decisions than the log has, or cannot fold the log",
        ExitCode.NOT_VERIFIED: "not verified, because the process that verified a log was killed twice; or verified "
        "only in part, because --lenient skipped events",
        ExitCode.NOTHING_CHECKED: "nothing could be checked: the log has no event, its beginning is missing, or it "
        "has only the hook calls of a worker",
        ExitCode.END_MISSING: "sound, but events are known to be missing at the end",
        ExitCode.EXTENSION_STOPPED: "sound, but an extension was stopped, and its rules were not checked after the "
        "stop",
        ExitCode.SOUND: "sound: nothing is wrong in the part that was read",
    }
)
"""Exit code → meaning of the verdict, the most severe first."""
_BY_GRAVITY = tuple(VERDICTS)


_REMEDIES = {
    errno.EACCES: "run the command as a user with read permission",
    errno.EPERM: "run the command as a user with read permission",
    errno.ENOENT: "the file was retired or moved meanwhile; run the command again",
    errno.ENOTDIR: "give the directory of a log",
    errno.ELOOP: "a symbolic link on this path points to itself; fix the link",
    errno.EIO: "the disk or the network failed; copy the readable part, and run the command on the copy",
    errno.ESTALE: "the network file system lost the file; mount that file system again",
}


def unreadable_text(error: OSError) -> str:
    """Return the message for a file or directory that could not be read: its name, the reason and the remedy."""
    if hasattr(error, "remedy"):  # `RefusedFile` has all three in its text
        return str(error)
    name = f"{error.filename}: " if error.filename else ""
    reason = error.strerror or str(error) or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0, "fix the cause, or run the command on a copy of the log")
    if error.errno == errno.ENOENT and error.filename and Path(error.filename).is_symlink():
        remedy = "the path is a symbolic link to a missing file; fix or remove the link"
    return f"{name}cannot be read ({reason}); {remedy}"


def gravest(codes: Iterable[ExitCode]) -> ExitCode:
    """Return the most severe exit code. A code that is not a verdict overrides every verdict."""
    found = set(codes)
    return next((code for code in (*found.difference(_BY_GRAVITY), *_BY_GRAVITY) if code in found), ExitCode.SOUND)


class CommandFailed(Exception):
    """Raised to end a command with a message on stderr and an exit code."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
