"""Keeps I/O trouble away from the engine: frames that cannot be written wait in memory, in order, within a bound.

Time does not exist here: the back-off between attempts is counted in appends, so a run can be replayed. Sequence
numbers are handed out as if the frames had been written, and are the ones they are later written with. When the bound
is reached the newest frames are dropped, all until the backlog is written out; one GAP frame then stands for them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import attrs

from kvledger.storage.events.errors import AppendConflict, LogClosed
from kvledger.storage.events.frames import FRAME_HEADER_BYTES, check_append
from kvledger.storage.events.reappend import sequence_of_repeated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvledger.storage.events.frames import Frame
    from kvledger.storage.events.protocol import EventStore

__all__ = ["BacklogEventStore"]

_DEFAULT_BACKLOG_BYTES: Final = 16 << 20
_MAX_APPENDS_BETWEEN_ATTEMPTS: Final = 1024


@attrs.define
class _Waiting:
    """A frame that is not written yet; without payload it is a gap, for `reason`."""

    first_sequence: int
    num_events: int
    payload: bytes | None
    reason: str = ""


class BacklogEventStore:
    """An `EventStore` around another one, whose `append`, `append_gap`, `flush` and `close` never raise `OSError`.

    `on_trouble(error, num_events_backlogged)` is called at each failed attempt; it must not raise.
    """

    def __init__(
        self,
        store: EventStore,
        max_backlog_bytes: int = _DEFAULT_BACKLOG_BYTES,
        on_trouble: Callable[[OSError, int], None] = lambda _error, _num_events: None,
    ) -> None:
        """Wrap `store`, which nobody else may append to from now on."""
        self._store = store
        self._max_backlog_bytes = max_backlog_bytes
        self._on_trouble = on_trouble
        self._waiting: deque[_Waiting] = deque()
        self._dropping: _Waiting | None = None
        self._num_backlog_bytes = 0
        self._num_events_backlogged = 0
        self._num_events_lost = 0
        self._last_error: OSError | None = None
        self._appends_until_attempt = 0
        self._back_off_appends = 1
        self._next_sequence = store.next_sequence
        self._closed = False

    @property
    def num_events_backlogged(self) -> int:
        """Events that wait in memory to be written."""
        return self._num_events_backlogged

    @property
    def num_events_lost(self) -> int:
        """Events dropped so far because the backlog was full, and those that `close` could not write."""
        return self._num_events_lost

    @property
    def next_sequence(self) -> int:
        """The sequence number that the next appended event gets, written or not."""
        return self._next_sequence

    @property
    def head_hash(self) -> bytes:
        """The chain hash of the last frame that was written."""
        return self._store.head_hash

    def append(self, payload: bytes, num_events: int, *, expected_sequence: int | None = None) -> int:
        """Append one frame, or keep it for later; see `EventStore.append`."""
        self._check_open()
        if expected_sequence is not None and expected_sequence != self._next_sequence:
            return self._repeat(payload, num_events, expected_sequence)
        first_sequence = self._next_sequence
        if not self._waiting:
            try:
                # The expected sequence makes a repetition harmless where a store cannot tell whether a write succeeded.
                self._store.append(payload, num_events, expected_sequence=first_sequence)
            except OSError as error:
                return self._keep_after(error, _Waiting(first_sequence, num_events, payload))
            self._next_sequence = first_sequence + num_events
            return first_sequence
        check_append(num_events, len(payload))
        return self._keep_waiting(_Waiting(first_sequence, num_events, payload))

    def append_gap(self, num_events: int, reason: str) -> int:
        """Append a gap, or keep it for later; see `EventStore.append_gap`."""
        self._check_open()
        check_append(num_events, len(reason))
        gap = _Waiting(self._next_sequence, num_events, None, reason)
        if self._waiting:
            return self._keep_waiting(gap)
        try:
            self._write(gap)
        except OSError as error:
            return self._keep_after(error, gap)
        self._next_sequence += num_events
        return gap.first_sequence

    def read(self, from_sequence: int = 1) -> Iterator[Frame]:
        """Yield what is written; what waits has no chain hash yet and is not shown. May raise `OSError`."""
        return self._store.read(from_sequence)

    def flush(self) -> None:
        """Try to write what waits, and flush. Trouble goes to `on_trouble`."""
        self._check_open()
        self._write_waiting()
        self._attempt(self._store.flush)

    def close(self) -> None:
        """Try once more to write what waits; what cannot be written is counted as lost. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._write_waiting()
        self._num_events_lost += self._num_events_backlogged
        self._num_events_backlogged = 0
        self._attempt(self._store.close)

    def _keep_after(self, error: OSError, frame: _Waiting) -> int:
        self._next_sequence += frame.num_events
        self._last_error = error
        self._keep(frame)
        self._back_off(error)
        return frame.first_sequence

    def _keep_waiting(self, frame: _Waiting) -> int:
        self._next_sequence += frame.num_events
        self._keep(frame)
        self._appends_until_attempt -= 1
        if self._appends_until_attempt <= 0:
            self._write_waiting()
        return frame.first_sequence

    def _write(self, frame: _Waiting) -> None:
        if frame.payload is not None:
            self._store.append(frame.payload, frame.num_events, expected_sequence=frame.first_sequence)
        elif self._store.next_sequence == frame.first_sequence:
            self._store.append_gap(frame.num_events, frame.reason)

    def _keep(self, frame: _Waiting) -> None:
        num_bytes = _size(frame)
        if self._dropping is None and self._num_backlog_bytes + num_bytes <= self._max_backlog_bytes:
            self._waiting.append(frame)
            self._num_backlog_bytes += num_bytes
            self._num_events_backlogged += frame.num_events
            return
        self._num_events_lost += frame.num_events
        if self._dropping is None:
            reason = f"the backlog was full while writing failed: {self._last_error}"
            self._dropping = _Waiting(frame.first_sequence, 0, None, reason)
            self._waiting.append(self._dropping)
        self._dropping.num_events += frame.num_events

    def _write_waiting(self) -> None:
        while self._waiting:
            frame = self._waiting[0]
            try:
                self._write(frame)
            except OSError as error:
                self._back_off(error)
                return
            self._waiting.popleft()
            if frame is self._dropping:
                self._dropping = None
            else:
                self._num_backlog_bytes -= _size(frame)
                self._num_events_backlogged -= frame.num_events
        self._back_off_appends = 1

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self._on_trouble(error, self._num_events_backlogged)

    def _back_off(self, error: OSError) -> None:
        self._last_error = error
        self._appends_until_attempt = self._back_off_appends
        self._back_off_appends = min(2 * self._back_off_appends, _MAX_APPENDS_BETWEEN_ATTEMPTS)
        self._on_trouble(error, self._num_events_backlogged)

    def _repeat(self, payload: bytes, num_events: int, expected_sequence: int) -> int:
        """Answer an append that repeats an earlier one, which may be written, waiting or lost."""
        for frame in self._waiting:
            if frame.first_sequence == expected_sequence and (frame.payload, frame.num_events) == (payload, num_events):
                return expected_sequence
        if expected_sequence > self._next_sequence or expected_sequence >= self._store.next_sequence:
            msg = (
                f"append expected sequence {expected_sequence}, where no equal frame waits to be written; "
                f"append at {self._next_sequence}"
            )
            raise AppendConflict(msg)
        try:
            return sequence_of_repeated(self._store, payload, num_events, expected_sequence)
        except OSError as error:
            self._on_trouble(error, self._num_events_backlogged)
            msg = f"append expected sequence {expected_sequence}, which cannot be read to compare: {error}"
            raise AppendConflict(msg) from error

    def _check_open(self) -> None:
        if self._closed:
            msg = "the log was closed; open it again to append"
            raise LogClosed(msg)


def _size(frame: _Waiting) -> int:
    return FRAME_HEADER_BYTES + len(frame.payload if frame.payload is not None else frame.reason)
