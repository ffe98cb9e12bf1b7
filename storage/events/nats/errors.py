"""Errors of shipping to a stream and reading from it. Their types show whether trying again helps."""

from __future__ import annotations

from kvledger.storage.events.store import LogError

__all__ = ["LogForked", "NothingToRead", "StreamError", "StreamRefused", "StreamUnavailable"]


class StreamError(LogError):
    """Base class of errors that a stream causes."""


class StreamUnavailable(StreamError):
    """No server was reached, there was no answer, or the stream has no space. Nothing is lost; try again later."""


class StreamRefused(StreamError):
    """Credentials, permissions, a certificate or the stream's settings must be corrected before another attempt."""


class NothingToRead(StreamError):
    """The stream has dropped the older messages of a log, and has no header block of its segments any more."""


class LogForked(StreamError):
    """The log in the stream and the log's files differ, so no more of the log is shipped."""
