"""The interface of every event store, and the errors that stores raise.

A store does not decode the payloads of frames. I/O errors are raised as `OSError`.
"""

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
    """The failures that a frame survives after `append` has returned."""

    OS = "os"
    """The end of the process, even by SIGKILL. A power cut loses the frames that the kernel has not written to disk."""
    DISK = "disk"
    """Also a power cut, as soon as the next grouped `fdatasync` has returned. `flush` waits for an `fdatasync`."""


class LogError(Exception):
    """Base class of all errors of event stores."""


class LogDamaged(LogError):
    """The stored bytes are not the bytes that were written. `read_log` reads the intact frames nevertheless."""


class LogTooNew(LogError):
    """The log has a newer format than this version of kvledger can read."""


class LogLocked(LogError):
    """Another writer holds the log's lock."""


class AppendConflict(LogError):
    """The caller of `append` expected another sequence number than the log's next one."""

    @classmethod
    def at(cls, expected_sequence: int, next_sequence: int) -> AppendConflict:
        """Return the error for an append at `expected_sequence` to a log whose next number is `next_sequence`."""
        return cls(f"append expected sequence number {expected_sequence}, but the log's next one is {next_sequence}")


class LogClosed(LogError):
    """The store was closed, so it accepts no appends. Its frames can be read."""


class EventStore(Protocol):
    """An append-only sequence of frames with one writer. Sequence numbers of events begin at 1; none is left out."""

    @property
    def next_sequence(self) -> int:
        """Sequence number of the next appended event."""

    @property
    def head_hash(self) -> bytes:
        """Chain hash (16 bytes) of the last frame, or of the log's header while the log is empty.

        If you record the hash elsewhere, you can detect a rewritten log.
        """

    def is_quick(self, num_payload_bytes: int) -> bool:
        """Whether `append` could now write a payload of this size in a single write, without waiting for a disk."""

    def append(self, payload: bytes, num_events: int, *, expected_sequence: int | None = None) -> int:
        """Append `num_events` events as one frame, whole or not at all, and return the first event's sequence number.

        `expected_sequence` is the sequence number that the caller expects for the first event; None: not checked.

        Raises:
            ValueError: `num_events` is not positive, or the payload is too large for a frame.
            AppendConflict: the log's next sequence number is not `expected_sequence`.
            LogClosed: the store was closed.
            OSError: the frame could not be written. The log is unchanged.
        """

    def append_gap(self, num_events: int, reason: str) -> int:
        """Append a GAP frame, with `reason`, in place of `num_events` events that could not be written.

        Returns and raises like `append`.
        """

    def note_unwritten(self, num_events: int, reason: str) -> None:
        """Record that `num_events` events from `next_sequence` on cannot be written, and why; 0: all are written.

        If the writer is killed, readers learn from this record which events are missing. Never raises. A store is free
        to ignore the call.
        """

    def read(self, from_sequence: int = 1) -> Iterator[Frame]:
        """Yield the frames in order, beginning with the frame of event `from_sequence`. Works after `close`, too.

        Raises:
            LogDamaged: the stored bytes are not the bytes that were written.
        """

    def flush(self) -> None:
        """Wait until all appended frames have the store's durability. Raises `OSError` and `LogClosed`."""

    def close(self, expected_sequence: int | None = None) -> None:
        """Flush and release the log. Closing again does nothing.

        `expected_sequence` is the sequence number after the caller's last event. The store records it, so that a reader
        knows which events never reached the store. None: not recorded.
        """
