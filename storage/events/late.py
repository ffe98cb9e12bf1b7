"""A log that cannot be begun yet, because the disk is full: every append tries to begin it first.

Within a `BacklogEventStore` the events wait in memory meanwhile, and are the first of the log when there is room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvledger.storage.events.segment_file import NO_PREVIOUS_HASH
from kvledger.storage.events.store import AppendConflict, LogClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvledger.storage.events.frames import Frame
    from kvledger.storage.events.store import EventStore

__all__ = ["LateEventStore"]


class LateEventStore:
    """An `EventStore` that is empty until `begin` returns one. `begin` raises `OSError` until there is room."""

    def __init__(self, begin: Callable[[], EventStore]) -> None:
        """Begin nothing yet."""
        self._begin = begin
        self._store: EventStore | None = None
        self._closed = False

    @property
    def next_sequence(self) -> int:
        """See `EventStore.next_sequence`."""
        return 1 if self._store is None else self._store.next_sequence

    @property
    def head_hash(self) -> bytes:
        """See `EventStore.head_hash`; zeros until the log has begun."""
        return NO_PREVIOUS_HASH if self._store is None else self._store.head_hash

    def is_quick(self, num_payload_bytes: int) -> bool:
        """See `EventStore.is_quick`."""
        return self._store is not None and self._store.is_quick(num_payload_bytes)

    def append(self, payload: bytes, num_events: int, *, expected_sequence: int | None = None) -> int:
        """See `EventStore.append`. Raises `OSError` while the log cannot be begun."""
        if expected_sequence is not None and expected_sequence != self.next_sequence:
            raise AppendConflict.at(expected_sequence, self.next_sequence)
        return self._begun().append(payload, num_events, expected_sequence=expected_sequence)

    def append_gap(self, num_events: int, reason: str) -> int:
        """See `EventStore.append_gap`. Raises `OSError` while the log cannot be begun."""
        return self._begun().append_gap(num_events, reason)

    def note_unwritten(self, num_events: int, reason: str) -> None:
        """See `EventStore.note_unwritten`; a log that has not begun has no place for it."""
        if self._store is not None:
            self._store.note_unwritten(num_events, reason)

    def read(self, from_sequence: int = 1) -> Iterator[Frame]:
        """See `EventStore.read`."""
        return iter(()) if self._store is None else self._store.read(from_sequence)

    def flush(self) -> None:
        """See `EventStore.flush`."""
        if self._store is not None:
            self._store.flush()

    def close(self, expected_sequence: int | None = None) -> None:
        """See `EventStore.close`; a log that has not begun never will."""
        self._closed = True
        if self._store is not None:
            self._store.close(expected_sequence)

    def _begun(self) -> EventStore:
        if self._store is None:
            if self._closed:
                msg = "the log was closed before it could be begun; begin another one to append"
                raise LogClosed(msg)
            self._store = self._begin()
        return self._store
