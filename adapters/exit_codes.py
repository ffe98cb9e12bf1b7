"""Exit codes of `kvledger`; of several the gravest goes: damage, a broken rule, a divergence, a missing end."""

from __future__ import annotations

import enum
from collections.abc import Iterable


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
    TRY_AGAIN = 75
    """A stream's server cannot be reached or has no room, or not everything is shipped: the same command later."""
    REFUSED = 77
    """A stream's server refused the credentials or the request, or its certificate was refused."""
    INTERRUPTED = 130
    BROKEN_PIPE = 141


_BY_GRAVITY = (ExitCode.DAMAGED, ExitCode.RULE_BROKEN, ExitCode.DIVERGED, ExitCode.END_MISSING, ExitCode.SOUND)


def gravest(codes: Iterable[ExitCode]) -> ExitCode:
    """The exit code of a command that read several logs."""
    found = set(codes)
    return next((code for code in _BY_GRAVITY if code in found), ExitCode.SOUND)


class CommandFailed(Exception):
    """Ends a command with a message on stderr and an exit code."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code
