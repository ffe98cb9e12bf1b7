"""Everything an event store refuses. I/O trouble is not here: it stays the `OSError` the operating system gave."""

from __future__ import annotations

__all__ = ["AppendConflict", "LogClosed", "LogDamaged", "LogError", "LogLocked", "LogTooNew"]


class LogError(Exception):
    """Base of every refusal of an event store."""


class LogDamaged(LogError):
    """The stored bytes are not what was written; `read_log` still shows what is intact."""


class LogTooNew(LogError):
    """The log was written in a format that this version cannot read."""


class LogLocked(LogError):
    """Another writer holds the log."""


class AppendConflict(LogError):
    """`expected_sequence` is not where the log ends: writer and log count differently."""

    @classmethod
    def at(cls, expected_sequence: int, next_sequence: int) -> AppendConflict:
        """The log ends before `next_sequence`."""
        return cls(f"append expected sequence {expected_sequence}, the log goes on with {next_sequence}")


class LogClosed(LogError):
    """The store was closed; it can still be read."""
