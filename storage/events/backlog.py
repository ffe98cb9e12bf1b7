"""Keeps I/O trouble away from the engine: frames that cannot be written wait in memory, in order, within a bound.

An append after some time tries them again; the clock is the caller's, so a run can be repeated. An engine that is idle
appends nothing: with `retries_alone` a thread tries, which is there only while something waits. Sequence numbers are
handed out as if the frames had been written, and are the ones they are later written with. When the bound is reached
the newest frames are dropped, all until the backlog is written out; one GAP frame then stands for them. How many events
wait is noted in the store, where the next start and `verify` find it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import attrs

from kvledger.storage.events.frames import FRAME_HEADER_BYTES, check_append
from kvledger.storage.events.store import AppendConflict, LogClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvledger.storage.events.frames import Frame
    from kvledger.storage.events.store import EventStore

__all__ = ["BacklogEventStore"]

_DEFAULT_BACKLOG_BYTES: Final = 16 << 20
_FIRST_PAUSE_SECONDS: Final = 0.1
_MAX_PAUSE_SECONDS: Final = 5.0


@attrs.define
class _Waiting:
    """A frame that is not written yet; without payload it is a gap, for `reason`."""

    first_sequence: int
    num_events: int
    payload: bytes | None
    reason: str = ""


class BacklogEventStore:
    """An `EventStore` around another one, whose `append`, `append_gap`, `flush` and `close` never raise `OSError`.

    `on_trouble(error, num_events_backlogged)` is called at each failed attempt, `on_written_again(num_events)` when
    nothing waits any more; neither must raise. With `retries_alone` they may be called from another thread.
    """

    def __init__(
        self,
        store: EventStore,
        max_backlog_bytes: int = _DEFAULT_BACKLOG_BYTES,
        on_trouble: Callable[[OSError, int], None] = lambda _error, _num_events: None,
        on_written_again: Callable[[int], None] = lambda _num_events: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        retries_alone: bool = False,
    ) -> None:
        """Wrap `store`, which nobody else may append to from now on."""
        self._store = store
        self._max_backlog_bytes = max_backlog_bytes
        self._on_trouble = on_trouble
        self._on_written_again = on_written_again
        self._clock = clock
        self._retries_alone = retries_alone
        self._lock = threading.RLock()
        """Held by whoever appends or tries again."""
        self._closing = threading.Event()
        self._retrying: threading.Thread | None = None
        self._waiting: deque[_Waiting] = deque()
        self._dropping: _Waiting | None = None
        self._num_backlog_bytes = 0
        self._num_events_backlogged = 0
        self._num_events_lost = 0
        self._last_error: OSError | None = None
        self._attempt_at = 0.0
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._next_sequence = store.next_sequence
        self._closed = False

    @property
    def num_events_backlogged(self) -> int:
        """Events that wait in memory to be written."""
        return self._num_events_backlogged

    @property
    def is_behind(self) -> bool:
        """Whether anything that was appended is not written yet."""
        return bool(self._waiting)

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
        with self._lock:
            return self._append(payload, num_events, expected_sequence)

    def _append(self, payload: bytes, num_events: int, expected_sequence: int | None) -> int:
        self._check_open()
        if expected_sequence is not None and expected_sequence != self._next_sequence:
            raise AppendConflict.at(expected_sequence, self._next_sequence)
        first_sequence = self._next_sequence
        if not self._waiting:
            try:
                self._store.append(payload, num_events, expected_sequence=first_sequence)
            except OSError as error:
                return self._keep_after(error, _Waiting(first_sequence, num_events, payload))
            self._next_sequence = first_sequence + num_events
            return first_sequence
        check_append(num_events, len(payload))
        return self._keep_waiting(_Waiting(first_sequence, num_events, payload))

    def append_gap(self, num_events: int, reason: str) -> int:
        """Append a gap, or keep it for later; see `EventStore.append_gap`."""
        with self._lock:
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

    def note_unwritten(self, num_events: int, reason: str) -> None:
        """See `EventStore.note_unwritten`; this store notes by itself what waits in it."""
        self._store.note_unwritten(num_events, reason)

    def read(self, from_sequence: int = 1) -> Iterator[Frame]:
        """Yield what is written; what waits has no chain hash yet and is not shown. May raise `OSError`."""
        return self._store.read(from_sequence)

    def flush(self) -> None:
        """Try to write what waits, and flush. Trouble goes to `on_trouble`."""
        with self._lock:
            self._check_open()
            self._write_waiting()
            self._attempt(self._store.flush)

    def close(self) -> None:
        """Try once more to write what waits; what cannot be written is counted as lost. Closing again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._write_waiting()
            self._num_events_lost += self._num_events_backlogged
            self._num_events_backlogged = 0
            self._attempt(self._store.close)
            retrying = self._retrying
        self._closing.set()
        if retrying is not None:
            retrying.join()

    def _keep_after(self, error: OSError, frame: _Waiting) -> int:
        self._next_sequence += frame.num_events
        self._last_error = error
        self._keep(frame)
        self._back_off(error)
        if self._retries_alone and (self._retrying is None or not self._retrying.is_alive()):
            self._retrying = threading.Thread(target=self._retry_until_written, name="kvledger-backlog", daemon=True)
            self._retrying.start()
        return frame.first_sequence

    def _retry_until_written(self) -> None:
        while not self._closing.wait(self._pause_seconds):
            with self._lock:
                if not self._closed:  # while this thread waited for the lock
                    self._write_waiting()
                if self._closed or not self._waiting:
                    self._retrying = None
                    return

    def _keep_waiting(self, frame: _Waiting) -> int:
        self._next_sequence += frame.num_events
        self._keep(frame)
        if self._clock() >= self._attempt_at:
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
        if not self._waiting:
            return
        num_events_before = self._num_events_backlogged
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
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._store.note_unwritten(0, "")
        self._on_written_again(num_events_before)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self._on_trouble(error, self._num_events_backlogged)

    def _back_off(self, error: OSError) -> None:
        self._last_error = error
        self._attempt_at = self._clock() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, _MAX_PAUSE_SECONDS)
        self._store.note_unwritten(self._next_sequence - self._store.next_sequence, str(error))
        self._on_trouble(error, self._num_events_backlogged)

    def _check_open(self) -> None:
        if self._closed:
            msg = "the log was closed; begin another one to append"
            raise LogClosed(msg)


def _size(frame: _Waiting) -> int:
    return FRAME_HEADER_BYTES + len(frame.payload if frame.payload is not None else frame.reason)
