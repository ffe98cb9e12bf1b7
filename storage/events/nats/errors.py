"""What shipping to and reading from a stream can run into. The distinction that matters: does trying again help?"""

from __future__ import annotations

from kvledger.storage.events.store import LogError

__all__ = ["LogForked", "NothingToRead", "StreamError", "StreamRefused", "StreamUnavailable"]


class StreamError(LogError):
    """Base of everything that a stream can be the reason of."""


class StreamUnavailable(StreamError):
    """No server, no answer, no capacity in the stream: nothing is lost, and trying again later is right."""


class StreamRefused(StreamError):
    """Credentials, permissions, a certificate, a missing or unsuitable stream: something must be changed first."""


class NothingToRead(StreamError):
    """The stream dropped so much of a log that no segment of it has a beginning."""


class LogForked(StreamError):
    """The stream and the files hold different continuations of one log, so nothing is shipped behind them."""
