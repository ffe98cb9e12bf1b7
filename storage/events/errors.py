"""Everything an event store refuses. I/O trouble is not here: it stays the `OSError` the operating system gave."""

from __future__ import annotations

__all__ = ["AppendConflict", "LogClosed", "LogDamaged", "LogError", "LogLocked", "LogTooNew"]


class LogError(Exception):
    """Base of every refusal of an event store."""


class LogDamaged(LogError):
    """The stored bytes are not what was written.

    Nothing is appended to such a log; `read_log` still shows what is intact.
    """


class LogTooNew(LogError):
    """The log was written in a format that this version cannot read."""


class LogLocked(LogError):
    """Another writer holds the log."""


class AppendConflict(LogError):
    """`expected_sequence` names a place where other bytes are stored, or that the log has not reached."""


class LogClosed(LogError):
    """The store was closed; it can still be read."""
