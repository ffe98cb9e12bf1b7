"""A log that cannot begin yet because the disk is full. Every append first tries to begin the log.

Wrap this store in a `BacklogEventStore`, so that events wait in memory until the log begins.
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
    """An `EventStore` that is empty until it can create its log.

    Each append calls `begin`, until a call returns the store of the new log. While the disk is full, `begin` raises
    `OSError`.
    """

    def __init__(self, begin: Callable[[], EventStore]) -> None:
        """Keep `begin` for the first append."""
        self._begin = begin
        self._store: EventStore | None = None
        self._closed = False

    @property
    def next_sequence(self) -> int:
        """See `EventStore.next_sequence`."""
        return 1 if self._store is None else self._store.next_sequence

    @property
    def head_hash(self) -> bytes:
        """See `EventStore.head_hash`; zeros until the log begins."""
        return NO_PREVIOUS_HASH if self._store is None else self._store.head_hash

    def is_quick(self, num_payload_bytes: int) -> bool:
        """See `EventStore.is_quick`."""
        return self._store is not None and self._store.is_quick(num_payload_bytes)

    def append(self, payload: bytes, num_events: int, *, expected_sequence: int | None = None) -> int:
        """See `EventStore.append`. Raises `OSError` while the log cannot begin."""
        if expected_sequence is not None and expected_sequence != self.next_sequence:
            raise AppendConflict.at(expected_sequence, self.next_sequence)
        return self._begun().append(payload, num_events, expected_sequence=expected_sequence)

    def append_gap(self, num_events: int, reason: str) -> int:
        """See `EventStore.append_gap`. Raises `OSError` while the log cannot begin."""
        return self._begun().append_gap(num_events, reason)

    def note_unwritten(self, num_events: int, reason: str) -> None:
        """See `EventStore.note_unwritten`. Does nothing until the log begins."""
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
        """See `EventStore.close`. If the log has not begun before this call, it never begins."""
        self._closed = True
        if self._store is not None:
            self._store.close(expected_sequence)

    def _begun(self) -> EventStore:
        if self._store is None:
            if self._closed:
                msg = "the log was closed before it could be created; create another one to append"
                raise LogClosed(msg)
            self._store = self._begin()
        return self._store
