"""The event store that keeps its newest frames in memory."""

from __future__ import annotations

import types
import uuid
from collections import deque
from typing import TYPE_CHECKING, Final

from kvledger.storage.events.frames import MAX_EVENTS, MAX_PAYLOAD_BYTES, Frame, FrameKind, check_append, encode_frame
from kvledger.storage.events.segment_file import NO_PREVIOUS_HASH, decode_header, encode_header
from kvledger.storage.events.store import AppendConflict, LogClosed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
from itertools import takewhile

__all__ = ["MemoryEventStore"]

_NO_HEADER: Final[Mapping[str, object]] = types.MappingProxyType({})


class MemoryEventStore:
    """An `EventStore` in memory, which is lost when the process ends. It adds a `log_id` to `header`.

    If the payloads exceed `max_bytes`, the oldest frames are dropped. The other frames can be shown, but not replayed.
    """

    def __init__(self, header: Mapping[str, object] = _NO_HEADER, *, max_bytes: int | None = None) -> None:
        """Begin an empty log. Raises `LogError` if the header cannot be stored."""
        log_id = uuid.uuid4().hex
        block = encode_header(log_id, 1, NO_PREVIOUS_HASH, header)
        self.header: Final = {**header, "log_id": log_id}
        self._frames: deque[Frame] = deque()
        self._unhashed: deque[tuple[FrameKind, int, int, bytes]] = deque()
        """Frames whose hash is not computed yet: (kind, first sequence number, number of events, payload)."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._next_sequence = 1
        self._head_hash = decode_header(block, "memory").chain_hash
        self._closed = False

    @property
    def next_sequence(self) -> int:
        """Sequence number of the next appended event."""
        return self._next_sequence

    @property
    def head_hash(self) -> bytes:
        """Chain hash of the last frame, or of the header while the log is empty."""
        self._hash()
        return self._head_hash

    def is_quick(self, num_payload_bytes: int) -> bool:  # noqa: ARG002 -- of every size
        """See `EventStore.is_quick`."""
        return True

    def append(self, payload: bytes, num_events: int, *, expected_sequence: int | None = None) -> int:
        """Append one frame; see `EventStore.append`."""
        self._check_open()
        if expected_sequence is not None and expected_sequence != self._next_sequence:
            raise AppendConflict.at(expected_sequence, self._next_sequence)
        return self._append(FrameKind.EVENTS, payload, num_events)

    def append_gap(self, num_events: int, reason: str) -> int:
        """Append a GAP frame; see `EventStore.append_gap`."""
        self._check_open()
        return self._append(FrameKind.GAP, reason.encode(errors="replace"), num_events)

    def note_unwritten(self, num_events: int, reason: str) -> None:
        """Do nothing: memory can always be written."""

    def read(self, from_sequence: int = 1) -> Iterator[Frame]:
        """Yield the frames in order; see `EventStore.read`."""
        self._hash()
        wanted = takewhile(lambda frame: frame.next_sequence > from_sequence, reversed(self._frames))
        yield from reversed(tuple(wanted))

    def flush(self) -> None:
        """Raise `LogClosed` after `close`."""
        self._check_open()

    def close(self, expected_sequence: int | None = None) -> None:  # noqa: ARG002 -- there is no reader afterwards
        """Refuse appends from now on."""
        self._closed = True

    def _append(self, kind: FrameKind, payload: bytes, num_events: int) -> int:
        if not 0 < num_events <= MAX_EVENTS or len(payload) > MAX_PAYLOAD_BYTES:
            check_append(num_events, len(payload))
        first_sequence = self._next_sequence
        self._unhashed.append((kind, first_sequence, num_events, payload))
        self._num_bytes += len(payload)
        self._next_sequence += num_events
        if self._max_bytes is not None and self._num_bytes > self._max_bytes:
            self._hash()
            while self._num_bytes > self._max_bytes and len(self._frames) > 1:
                self._num_bytes -= len(self._frames.popleft().payload)
        return first_sequence

    def _hash(self) -> None:
        while self._unhashed:
            kind, first_sequence, num_events, payload = self._unhashed.popleft()
            _, self._head_hash = encode_frame(kind, first_sequence, num_events, payload, self._head_hash)
            self._frames.append(Frame(first_sequence, num_events, kind, payload, self._head_hash))

    def _check_open(self) -> None:
        if self._closed:
            msg = "the memory log was closed; create another one to append"
            raise LogClosed(msg)
