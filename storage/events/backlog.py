"""Keep I/O errors from the engine: frames that cannot be written wait in memory, in order, up to a limit.

- By default, each append writes its frame itself. While frames are waiting, an append adds its frame to them. If
  enough time has passed since the last attempt, the append then tries to write all waiting frames.
- With `writes_alone`, an append writes its frame only if a single `write` call is enough. A thread writes all other
  frames, and retries even while the engine is idle. While frames are waiting, only the thread writes. An append waits
  for the thread at most `max_wait_ms`, and only if no other frame was waiting.

A waiting event keeps its sequence number. If the limit is reached, new frames are dropped until every waiting frame is
written. One GAP frame then takes the place of the dropped frames. The store records how many events wait, so that
`kvledger verify` and the next engine start know this number.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
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


@attrs.define(eq=False)
class _Waiting:
    """A frame that is not written yet. If `payload` is None, this is a GAP frame for events that cannot be written."""

    first_sequence: int
    num_events: int
    payload: bytes | None
    reason: str = ""
    is_lost: bool = False
    """Whether this is the GAP frame for frames that were dropped because the backlog was full."""


class BacklogEventStore:
    """An `EventStore` that wraps another store. `append`, `append_gap`, `flush` and `close` never raise `OSError`.

    `on_trouble(error, num_events_backlogged)` is called after each failed attempt to write. It is also called, with a
    `TimeoutError`, if an append waited `max_wait_ms` without success. After errors,
    `on_written_again(num_events_written, num_events_lost)` is called as soon as no frame is waiting. It gets two
    numbers: events that were written from the backlog, and events that were lost. Both count from the time when the
    backlog was last empty. Neither function may raise. With `writes_alone`, the store's own thread may call them.
    """

    def __init__(
        self,
        store: EventStore,
        max_backlog_bytes: int = _DEFAULT_BACKLOG_BYTES,
        on_trouble: Callable[[OSError, int], None] = lambda _error, _num_events: None,
        on_written_again: Callable[[int, int], None] = lambda _num_written, _num_lost: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        writes_alone: bool = False,
        max_wait_ms: float | None = None,
    ) -> None:
        """Wrap `store`, to which nothing else may append from now on. `max_wait_ms` None: wait without a limit."""
        self._store = store
        self._max_backlog_bytes = max_backlog_bytes
        self._on_trouble = on_trouble
        self._on_written_again = on_written_again
        self._clock = clock
        self._writes_alone = writes_alone
        self._max_wait_seconds = None if max_wait_ms is None else max_wait_ms / 1000
        self._changed = threading.Condition(threading.RLock())
        """Guards the attributes below. The thread does not hold it during a write, so no append waits for the write."""
        self._hurry = threading.Event()
        """Ends the thread's pause between two attempts."""
        self._thread: threading.Thread | None = None
        self._waiting: deque[_Waiting] = deque()
        self._dropping: _Waiting | None = None
        self._num_backlog_bytes = 0
        self._num_events_backlogged = 0
        self._num_events_lost = 0
        self._num_events_late = 0
        """Events written from the backlog since the backlog was last empty."""
        self._num_bytes_written = 0
        self._last_written_unix_ns = 0
        self._num_lost_before = 0
        self._num_failures = 0
        self._last_error: OSError | None = None
        """The latest error since the backlog was last empty, or None."""
        self._attempt_at = 0.0
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._next_sequence = store.next_sequence
        self._closed = False

    @property
    def num_events_backlogged(self) -> int:
        """Number of events that wait to be written."""
        return self._num_events_backlogged

    @property
    def is_behind(self) -> bool:
        """Whether any appended event is not written yet."""
        return bool(self._waiting)

    @property
    def num_events_lost(self) -> int:
        """Number of events that were lost because the backlog was full or `close` could not write them."""
        return self._num_events_lost

    @property
    def num_bytes_written(self) -> int:
        """Number of bytes of the frames written so far."""
        return self._num_bytes_written

    @property
    def last_written_unix_ns(self) -> int:
        """Time of the last write in ns since 1970; 0: nothing was written. For display only."""
        return self._last_written_unix_ns

    @property
    def next_sequence(self) -> int:
        """Sequence number of the next appended event."""
        return self._next_sequence

    @property
    def head_hash(self) -> bytes:
        """Chain hash of the last written frame."""
        return self._store.head_hash

    def is_quick(self, num_payload_bytes: int) -> bool:
        """See `EventStore.is_quick`."""
        return not self._waiting and self._store.is_quick(num_payload_bytes)

    def append(self, payload: bytes, num_events: int, *, expected_sequence: int | None = None) -> int:
        """Append one frame, or keep it in the backlog; see `EventStore.append`."""
        with self._changed:
            self._check_open()
            first_sequence = self._next_sequence
            if expected_sequence is not None and expected_sequence != first_sequence:
                raise AppendConflict.at(expected_sequence, first_sequence)
            if self._waiting or (self._writes_alone and not self._store.is_quick(len(payload))):
                check_append(num_events, len(payload))
                return self._keep_waiting(_Waiting(first_sequence, num_events, payload))
            try:
                self._store.append(payload, num_events, expected_sequence=first_sequence)
            except OSError as error:
                return self._keep_after(error, _Waiting(first_sequence, num_events, payload))
            self._note_written(FRAME_HEADER_BYTES + len(payload))
            self._next_sequence = first_sequence + num_events
            return first_sequence

    def append_gap(self, num_events: int, reason: str) -> int:
        """Append a GAP frame, or keep it in the backlog; see `EventStore.append_gap`."""
        with self._changed:
            self._check_open()
            check_append(num_events, len(reason))
            gap = _Waiting(self._next_sequence, num_events, None, reason)
            if self._waiting or (self._writes_alone and not self._store.is_quick(len(reason))):
                return self._keep_waiting(gap)
            try:
                self._write(gap)
            except OSError as error:
                return self._keep_after(error, gap)
            self._next_sequence += num_events
            return gap.first_sequence

    def note_unwritten(self, num_events: int, reason: str) -> None:
        """See `EventStore.note_unwritten`. The events of waiting frames are recorded without this call."""
        self._store.note_unwritten(num_events, reason)

    def read(self, from_sequence: int = 1) -> Iterator[Frame]:
        """Yield the written frames, not those in the backlog. Raises `OSError`."""
        return self._store.read(from_sequence)

    def flush(self) -> None:
        """Try to write the waiting frames, then flush the wrapped store. Errors go to `on_trouble`."""
        with self._changed:
            self._check_open()
            if not self._writes_alone:
                self._write_waiting()
            elif self._waiting:
                num_failures = self._num_failures
                self._hurry.set()
                self._changed.wait_for(lambda: not self._waiting or self._num_failures > num_failures)
        self._attempt(self._store.flush)

    def close(self, expected_sequence: int | None = None) -> None:
        """Try once more to write the waiting frames, then close. Frames that cannot be written are lost.

        Closing again does nothing.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._hurry.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self._write_waiting()
        finally:
            self._num_events_lost += self._num_events_backlogged
            self._num_events_backlogged = 0
            # The caller's own count, because an event may have been lost before its append.
            expected_sequence = self._next_sequence if expected_sequence is None else expected_sequence
            self._attempt(partial(self._store.close, expected_sequence))

    def _keep_after(self, error: OSError, frame: _Waiting) -> int:
        self._next_sequence += frame.num_events
        self._last_error = error
        self._keep(frame)
        self._failed(error)
        if self._writes_alone:
            self._have_it_written()
        return frame.first_sequence

    def _keep_waiting(self, frame: _Waiting) -> int:
        is_first = not self._waiting
        self._next_sequence += frame.num_events
        self._keep(frame)
        if not self._writes_alone:
            if self._clock() >= self._attempt_at:
                self._write_waiting()
            return frame.first_sequence
        self._have_it_written()
        if is_first:
            num_failures = self._num_failures
            self._changed.wait_for(
                lambda: not self._waiting or self._num_failures > num_failures, self._max_wait_seconds
            )
            if self._waiting and self._num_failures == num_failures:
                self._last_error = TimeoutError(
                    f"the disk did not create a file or write a frame within {self._max_wait_seconds} s"
                )
                self._on_trouble(self._last_error, self._num_events_backlogged)
        return frame.first_sequence

    def _have_it_written(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_alone, name="kvledger-log-writer", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _write_alone(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                pause_seconds = self._attempt_at - self._clock()
            if pause_seconds > 0:
                self._hurry.wait(pause_seconds)
            self._hurry.clear()
            if self._closed:
                return
            try:
                self._write_first()
            except BaseException as error:  # noqa: BLE001 -- whoever appends would wait for a thread that is gone
                self._failed(OSError(f"{type(error).__name__}: {error}"))

    def _write_waiting(self) -> None:
        while self._waiting and self._write_first():
            pass

    def _write_first(self) -> bool:
        """Write the oldest waiting frame. Return whether this succeeded."""
        with self._changed:
            frame = self._waiting[0]
            if frame is self._dropping:
                self._dropping = None  # the gap must not grow while it is written
        try:
            self._write(frame)
        except OSError as error:
            self._failed(error)
            return False
        if len(self._waiting) == 1 and self._last_error is not None:
            self._store.note_unwritten(0, "")
        with self._changed:
            # From here on, if no frame is waiting, an append may write.
            self._waiting.popleft()
            if not frame.is_lost:
                self._num_backlog_bytes -= _size(frame)
                self._num_events_backlogged -= frame.num_events
                self._num_events_late += frame.num_events
            if not self._waiting:
                self._is_written_again()
            self._changed.notify_all()
        return True

    def _is_written_again(self) -> None:
        is_over, self._last_error = self._last_error is not None, None
        num_events, self._num_events_late = self._num_events_late, 0
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        num_lost, self._num_lost_before = self._num_events_lost - self._num_lost_before, self._num_events_lost
        if is_over:
            self._on_written_again(num_events, num_lost)

    def _failed(self, error: OSError) -> None:
        self._store.note_unwritten(self._next_sequence - self._store.next_sequence, str(error))
        with self._changed:
            if self._waiting[-1].is_lost:
                self._dropping = self._waiting[-1]
            self._back_off(error)
            self._changed.notify_all()

    def _write(self, frame: _Waiting) -> None:
        if frame.payload is not None:
            self._store.append(frame.payload, frame.num_events, expected_sequence=frame.first_sequence)
        elif self._store.next_sequence == frame.first_sequence:
            self._store.append_gap(frame.num_events, frame.reason)
        else:
            return
        self._note_written(_size(frame))

    def _note_written(self, num_bytes: int) -> None:
        self._num_bytes_written += num_bytes
        self._last_written_unix_ns = time.time_ns()

    def _keep(self, frame: _Waiting) -> None:
        num_bytes = _size(frame)
        if self._dropping is None and self._num_backlog_bytes + num_bytes <= self._max_backlog_bytes:
            self._waiting.append(frame)
            self._num_backlog_bytes += num_bytes
            self._num_events_backlogged += frame.num_events
            return
        self._num_events_lost += frame.num_events
        if self._dropping is None:
            reason = f"the memory for waiting events was full while writing failed: {self._last_error}"
            self._dropping = _Waiting(frame.first_sequence, 0, None, reason, is_lost=True)
            self._waiting.append(self._dropping)
        self._dropping.num_events += frame.num_events

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self._on_trouble(error, self._num_events_backlogged)

    def _back_off(self, error: OSError) -> None:
        self._last_error = error
        self._num_failures += 1
        self._attempt_at = self._clock() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, _MAX_PAUSE_SECONDS)
        self._on_trouble(error, self._num_events_backlogged)

    def _check_open(self) -> None:
        if self._closed:
            msg = "the log was closed; create another one to append"
            raise LogClosed(msg)


def _size(frame: _Waiting) -> int:
    return FRAME_HEADER_BYTES + len(frame.payload if frame.payload is not None else frame.reason)
