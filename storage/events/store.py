"""What every event store promises, and what it refuses.

A store is opaque to what it stores: a payload is bytes. I/O trouble stays the `OSError` that the operating system gave.
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
    """What a frame outlives once `append` has returned."""

    OS = "os"
    """The process, also when it is killed. A power cut loses what the kernel had not yet written back."""
    DISK = "disk"
    """The machine, once the next grouped `fdatasync` is through; `flush` waits for one."""


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
        return cls(f"append expected sequence {expected_sequence}, the log ends before {next_sequence}")


class LogClosed(LogError):
    """The store was closed; it can still be read."""


class EventStore(Protocol):
    """An append-only sequence of frames with one writer. Event sequence numbers start at 1 and have no gap."""

    @property
    def next_sequence(self) -> int:
        """The sequence number that the next appended event gets."""

    @property
    def head_hash(self) -> bytes:
        """The chain hash (16 bytes) of the last frame, or of the log's header while the log is empty.

        Noted somewhere else, it is the anchor that makes a rewritten log detectable.
        """

    def is_quick(self, num_payload_bytes: int) -> bool:
        """Whether to append a frame of so many bytes now is one write, and nothing that waits for a disk."""

    def append(self, payload: bytes, num_events: int, *, expected_sequence: int | None = None) -> int:
        """Append `num_events` events as one frame, whole or not at all, and return the first one's sequence number.

        `expected_sequence` is where the caller thinks that the log ends.

        Raises:
            ValueError: `num_events` is not positive, or the payload is larger than a frame holds.
            AppendConflict: the log ends elsewhere than at `expected_sequence`.
            LogClosed: the store was closed.
            OSError: it could not be written; the log is as it was before.

        """

    def append_gap(self, num_events: int, reason: str) -> int:
        """Append a frame that accounts for `num_events` events that could not be written. Raises like `append`."""

    def note_unwritten(self, num_events: int, reason: str) -> None:
        """Note how many events from `next_sequence` on were taken and cannot be written, and why; 0: none any more.

        For readers of a log whose writer was killed meanwhile. Never raises; a store may have no place for it.
        """

    def read(self, from_sequence: int = 1) -> Iterator[Frame]:
        """Yield the frames in order, beginning with the one that holds `from_sequence`. Works after `close`, too.

        Raises:
            LogDamaged: the stored bytes are not what was written.

        """

    def flush(self) -> None:
        """Return when everything appended has reached the store's durability. Raises `OSError` and `LogClosed`."""

    def close(self, expected_sequence: int | None = None) -> None:
        """Flush, and let go of the log. Closing again does nothing.

        `expected_sequence` is where the caller's own count says that the log ends. It is noted next to the log, so a
        reader sees which events never arrived here.
        """
