"""An append whose `expected_sequence` is not the log's end: a repetition of what is stored, or a conflict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvledger.storage.events.errors import AppendConflict
from kvledger.storage.events.frames import FrameKind

if TYPE_CHECKING:
    from kvledger.storage.events.protocol import EventStore

__all__ = ["sequence_of_repeated"]


def sequence_of_repeated(store: EventStore, payload: bytes, num_events: int, expected_sequence: int) -> int:
    """Return `expected_sequence` if this very frame stands there in `store`. Raises `AppendConflict`."""
    if expected_sequence > store.next_sequence:
        msg = (
            f"append expected sequence {expected_sequence}, the log has only come to {store.next_sequence}; "
            "append what is missing first"
        )
        raise AppendConflict(msg)
    stored = next(iter(store.read(expected_sequence)), None)
    if stored is None or stored.first_sequence != expected_sequence:
        msg = f"append expected sequence {expected_sequence}, but no frame begins there; use a sequence append returned"
        raise AppendConflict(msg)
    if (stored.kind, stored.num_events, stored.payload) != (FrameKind.EVENTS, num_events, payload):
        msg = (
            f"append expected sequence {expected_sequence}, where other bytes stand ({stored.num_events} events, "
            f"{len(stored.payload)} bytes); append at {store.next_sequence}"
        )
        raise AppendConflict(msg)
    return expected_sequence
