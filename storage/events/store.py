"""The interface of every event store, and its errors. Payloads are opaque bytes; I/O errors are `OSError`."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvledger.storage.events.frames import Frame

__all__ = [
    "AppendConflict",
    "Durability",
    "EventStore",
    "LogClosed",
    "LogDamaged",
    "LogError",
    "LogLocked",
    "LogTooNew",
]


class Durability(enum.StrEnum):
    """The failures that a frame survives once `append` has returned."""

    OS = "os"
    """The end of the process, even by SIGKILL. A power cut loses what the kernel has not written back."""
    DISK = "disk"
    """A power cut, once the next grouped `fdatasync` has returned; `flush` waits for one."""


class LogError(Exception):
    """Base class of all errors of event stores."""


class LogDamaged(LogError):
    """The stored bytes are not what was written; `read_log` still reads what is intact."""


class LogTooNew(LogError):
    """This version cannot read the log's format."""


class LogLocked(LogError):
    """Another writer holds the log."""


class AppendConflict(LogError):
    """The log's next sequence number is not `expected_sequence`."""

    @classmethod
    def at(cls, expected_sequence: int, next_sequence: int) -> AppendConflict:
        """Return the error for a log that ends before `next_sequence`."""
        return cls(f"append expected sequence number {expected_sequence}, but the next one is {next_sequence}")


class LogClosed(LogError):
    """The store was closed; it can still be read."""


class EventStore(Protocol):
    """An append-only sequence of frames with one writer. Events are numbered from 1 without a gap."""

    @property
    def next_sequence(self) -> int:
        """Sequence number of the next appended event."""

    @property
    def head_hash(self) -> bytes:
        """Chain hash (16 bytes) of the last frame, or of the log's header while the log is empty.

        If you record the hash elsewhere, you can detect a rewritten log.
        """

    def is_quick(self, num_payload_bytes: int) -> bool:
        """Whether appending this many payload bytes now is a single write that waits for no disk."""

    def append(self, payload: bytes, num_events: int, *, expected_sequence: int | None = None) -> int:
        """Append `num_events` events as one frame, whole or not at all, and return the first event's sequence number.

        `expected_sequence` is the caller's own count.

        Raises:
            ValueError: `num_events` is not positive, or the payload is too large for a frame.
            AppendConflict: the log's next sequence number is not `expected_sequence`.
            LogClosed: the store was closed.
            OSError: the frame could not be written; the log is unchanged.
        """

    def append_gap(self, num_events: int, reason: str) -> int:
        """Append a frame for `num_events` events that could not be written. Raises like `append`."""

    def note_unwritten(self, num_events: int, reason: str) -> None:
        """Record how many events from `next_sequence` on cannot be written, and why; 0: none any more.

        Readers need this if the writer is killed. Never raises; a store may ignore the call.
        """

    def read(self, from_sequence: int = 1) -> Iterator[Frame]:
        """Yield the frames in order from the one with `from_sequence` on, even after `close`.

        Raises:
            LogDamaged: the stored bytes are not what was written.
        """

    def flush(self) -> None:
        """Wait until everything appended has the store's durability. Raises `OSError` and `LogClosed`."""

    def close(self, expected_sequence: int | None = None) -> None:
        """Flush and release the log. Closing again does nothing.

        `expected_sequence`, the number after the caller's last event, is recorded next to the log. It shows a reader
        which events never reached the store.
        """
