"""Exit codes of `kvledger`; where several apply, damage goes over a broken rule, and that over a divergence."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """What a script can rely on."""

    SOUND = 0
    RULE_BROKEN = 1
    DAMAGED = 2
    """Also: unreadable, or written by a newer version."""
    DIVERGED = 3
    """Today's code decides otherwise than the log, or cannot fold it."""
    USAGE = 64
    INTERRUPTED = 130
    BROKEN_PIPE = 141


class CommandFailed(Exception):
    """Ends a command with a message on stderr and an exit code."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code
