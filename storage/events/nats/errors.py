"""Errors of shipping to a stream and reading from it. Their types show whether trying again helps."""

from __future__ import annotations

from kvledger.storage.events.store import LogError

__all__ = ["LogForked", "NothingToRead", "StreamError", "StreamRefused", "StreamUnavailable"]


class StreamError(LogError):
    """Base class of errors that a stream causes."""


class StreamUnavailable(StreamError):
    """No server, no answer, or no space in the stream. Nothing is lost; try again later."""


class StreamRefused(StreamError):
    """Credentials, permissions, a certificate or the stream must be corrected first."""


class NothingToRead(StreamError):
    """The stream dropped so much of a log that it holds no segment's beginning."""


class LogForked(StreamError):
    """The stream and the files continue one log differently, so nothing more of it is shipped."""
