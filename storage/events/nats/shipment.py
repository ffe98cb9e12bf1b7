"""One log on its way into the stream, over one connection: where the stream is, what comes next, what is in the way.

Nothing is remembered from an earlier connection: the last message of the log's subject is the only cursor.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

import attrs

from kvledger.storage.events.errors import LogDamaged, LogError
from kvledger.storage.events.nats.errors import StreamRefused, StreamUnavailable
from kvledger.storage.events.nats.messages import Piece, message_headers, num_header_bytes, subject_of
from kvledger.storage.events.nats.publisher import BatchResult, Publisher, fits
from kvledger.storage.events.nats.room import Room
from kvledger.storage.events.nats.stream import last_piece, subjects_of_log
from kvledger.storage.events.nats.tail import LogTail, num_bytes_behind
from kvledger.storage.events.segment_file import segment_paths

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvledger.storage.events.nats.connection import Connection
    from kvledger.storage.events.reader import Damage

__all__ = ["LogProgress", "Shipment"]

_FIRST_WINDOW: Final = 32
_MAX_WINDOW: Final = 512
_MAX_BATCH_BYTES: Final = 4 << 20
_MAX_FRUITLESS: Final = 8
_STANDBY_S: Final = 2.0
_STUCK_S: Final = 2.0
_RETRY_AFTER_S: Final = 10.0


@attrs.define
class LogProgress:
    """What is known about shipping one log; outlives connections, and is for showing only.

    `num_frames` and `num_bytes` were shipped by this process; `last` is the last piece known to be in the stream.
    `problem` says why nothing more is shipped for now; `is_damaged`: because the log, or what the stream has of it, is
    not sound; `is_skipped`: because it need not be shipped; `is_refused`: because the server does not take it. `lost`
    has the sequences (first -> last) that were retired before they were shipped.
    """

    directory: Path
    log_id: str = ""
    subject: str = ""
    num_frames: int = 0
    num_bytes: int = 0
    last: Piece | None = None
    problem: str = ""
    is_damaged: bool = False
    is_skipped: bool = False
    is_refused: bool = False
    lost: dict[int, int] = attrs.field(factory=dict)
    remarks: list[str] = attrs.field(factory=list)
    """Said once, newest last; whoever shows them takes them out."""


class Shipment:
    """Ships one log over one connection: `start`, then `advance` again and again."""

    def __init__(
        self, connection: Connection, publisher: Publisher, room: Room, progress: LogProgress, label: str
    ) -> None:
        """Ship the log in `progress.directory`."""
        self._connection = connection
        self._publisher = publisher
        self._room = room
        self._label = label
        self._tail: LogTail | None = None
        self._stream_sequence = 0
        self._window = _FIRST_WINDOW
        self._num_fruitless = 0
        self._said_other = False
        self._resume_at = 0.0
        self._retry_at = float("inf")
        self._stuck_at = (0, 0, True)
        self._stuck_since = time.monotonic()
        self._is_examined = False
        self.progress: Final = progress

    @property
    def is_standing_by(self) -> bool:
        """Whether another shipper is at work on this log and is left to it for a moment."""
        return time.monotonic() < self._resume_at

    @property
    def is_due_again(self) -> bool:
        """Whether to `start` again, since what was in the way may be gone by now."""
        return time.monotonic() >= self._retry_at

    async def start(self, stream_max_age_s: float) -> None:
        """Find out where the stream is. What is wrong with the log goes into `progress.problem`.

        Raises:
            StreamUnavailable: no answer.
            StreamRefused: the server denies it.

        """
        progress = self.progress
        progress.problem, progress.is_damaged, progress.is_skipped, progress.is_refused = "", False, False, False
        self._retry_at = float("inf")
        with self._troubles():
            self._tail = LogTail(progress.directory)
            progress.log_id = self._tail.log_id
            progress.subject = await self._subject(self._tail.log_id)
            await self._find_place(self._tail)
        if progress.problem:
            return
        if progress.last is None and stream_max_age_s and _age_s(progress.directory) > stream_max_age_s:
            self._stop("it was last written longer ago than the stream keeps messages (max_age)", is_damaged=False)
            progress.is_skipped = True

    async def advance(self) -> bool:
        """Ship one batch; return False if there was nothing to ship.

        Raises:
            StreamUnavailable: the connection ended, the stream is full, or the server is silent.
            StreamRefused: the server denies it.

        """
        if self._tail is None or self.progress.problem:
            return False
        before = self._tail.last
        pieces: list[Piece] = []
        with self._troubles():
            pieces = self._tail.read(self._window, _MAX_BATCH_BYTES)
        self._take_lost(self._tail)
        pieces = self._without_too_large(self._tail, before, pieces)
        if not pieces:
            return False
        await self._room.take(self.progress.subject, pieces)
        result = await self._publisher.publish(self.progress.subject, pieces, self._stream_sequence)
        self._count(pieces, result)
        if result.num_stored == len(pieces) and not result.repeated:
            self._window = min(_MAX_WINDOW, self._window * 2)
        else:
            await self._go_on_after(self._tail, result, pieces[result.num_stored - 1] if result.num_stored else before)
        return True

    def check_end(self, *, is_final: bool) -> None:
        """After `advance` returned False: is this the log's end, or does something stand there that is no frame?

        A torn tail may be in the making, so it is final only with `is_final`; before that it is remarked on.
        """
        if self._tail is None or self.progress.problem:
            return
        if not self.progress.directory.exists():
            self._remark(f"the log is gone from here; it was shipped up to event {self._tail.next_sequence - 1}")
            return
        damage: Damage | None = None
        with self._troubles():
            if is_final or self._is_stuck(self._tail):
                damage = self._tail.trouble()
        if damage is None:
            return
        text = f"{damage.kind} in {damage.segment} at byte {damage.offset}: {damage.detail}"
        if damage.kind == "torn_tail" and not is_final:
            self._remark(f"{text}; waiting for its writer")
        else:
            self._stop(f"{text}; shipped up to event {self._tail.next_sequence - 1}, nothing behind", is_damaged=True)

    def _is_stuck(self, tail: LogTail) -> bool:
        """Whether bytes have stood behind the last piece for a while without becoming a frame; True once a state."""
        end = 0 if tail.last is None else tail.last.end
        state = (end, num_bytes_behind(tail.directory, tail.last), tail.is_in_place)
        if state != self._stuck_at:
            self._stuck_at, self._stuck_since, self._is_examined = state, time.monotonic(), False
        is_at_end = state[1] == 0 and state[2]
        if is_at_end or self._is_examined or time.monotonic() - self._stuck_since < _STUCK_S:
            return False
        self._is_examined = True
        return True

    async def _subject(self, log_id: str) -> str:
        """The subject that the stream has this log under, whatever the label was then; or the one to begin."""
        known = list(await subjects_of_log(self._connection, log_id))
        wanted = subject_of(self._label, log_id)
        if len(known) > 1:
            raise LogDamaged(f"the stream has this log under several subjects ({', '.join(known)}); purge all but one")
        if known and known[0] != wanted:
            self._remark(f"the stream has it as {known[0]}, so it is shipped there and not to {wanted}")
        return known[0] if known else wanted

    async def _find_place(self, tail: LogTail) -> None:
        stored = await last_piece(self._connection, self.progress.subject)
        self._stream_sequence = 0 if stored is None else stored.stream_sequence
        last = None if stored is None else stored.piece
        tail.seek(last)
        self.progress.last = last

    async def _go_on_after(self, tail: LogTail, result: BatchResult, last_stored: Piece | None) -> None:
        if isinstance(result.problem, StreamUnavailable):
            raise result.problem
        if result.problem is not None:
            self._stop(str(result.problem), is_damaged=False)
            self.progress.is_refused = isinstance(result.problem, StreamRefused)
            return
        self._window = max(1, result.num_stored)
        self._num_fruitless = 0 if result.num_stored else self._num_fruitless + 1
        if self._num_fruitless > _MAX_FRUITLESS:
            raise StreamUnavailable(f"{self._connection.address}: {self.progress.subject} does not stand still")
        with self._troubles():
            await self._find_place(tail)
        if self.progress.problem:
            return
        here, there = _position(last_stored), _position(self.progress.last)
        if result.repeated and there < here:
            raise StreamUnavailable(
                f"{self._connection.address}: messages of {self.progress.subject} were deleted, and the server takes "
                "them for repetitions when they are sent again; it does so until its duplicate window has passed"
            )
        if result.repeated or there > here:
            self._note_other_shipper()

    def _without_too_large(self, tail: LogTail, before: Piece | None, pieces: list[Piece]) -> list[Piece]:
        limit = self._connection.max_payload
        for index, piece in enumerate(pieces):
            if fits(piece, limit):
                continue
            tail.last = pieces[index - 1] if index else before
            if index == 0:
                num_bytes = num_header_bytes(message_headers(piece)) + len(piece.data)
                self._stop(
                    f"{piece} takes {num_bytes} bytes as a message, and the server's max_payload is {limit}; set "
                    "max_payload in the server's configuration above that, nothing behind this is shipped before",
                    is_damaged=False,
                )
            return pieces[:index]
        return pieces

    def _count(self, pieces: Sequence[Piece], result: BatchResult) -> None:
        stored = pieces[: result.num_stored]
        if not stored:
            return
        self._stream_sequence = result.stream_sequence
        self.progress.last = stored[-1]
        fresh = [piece for index, piece in enumerate(stored) if index not in result.repeated]
        self.progress.num_frames += sum(not piece.is_header for piece in fresh)
        self.progress.num_bytes += sum(len(piece.data) for piece in fresh)

    def _take_lost(self, tail: LogTail) -> None:
        for first, last in tail.lost.items():
            if first not in self.progress.lost:
                self.progress.lost[first] = last
                self._remark(
                    f"events {first} to {last} were retired here before they were shipped; the stream lacks them"
                )

    def _note_other_shipper(self) -> None:
        self._resume_at = time.monotonic() + _STANDBY_S
        if not self._said_other:
            self._said_other = True
            self._remark("another shipper is at work on this log; nothing is doubled, this one stands by")

    @contextlib.contextmanager
    def _troubles(self) -> Iterator[None]:
        """Let what is wrong with this log stop this log only. A file that cannot be read is tried again later."""
        try:
            yield
        except (StreamUnavailable, StreamRefused):
            raise
        except LogError as error:
            self._stop(str(error), is_damaged=True)
        except OSError as error:
            self._stop(f"its files cannot be read: {error}", is_damaged=False)
            self._retry_at = time.monotonic() + _RETRY_AFTER_S

    def _stop(self, reason: str, *, is_damaged: bool) -> None:
        self.progress.problem, self.progress.is_damaged = reason, is_damaged

    def _remark(self, text: str) -> None:
        self.progress.remarks.append(text)


def _position(piece: Piece | None) -> tuple[str, int]:
    return ("", 0) if piece is None else (piece.segment, piece.end)


def _age_s(directory: Path) -> float:
    segments = segment_paths(directory)
    return time.time() - segments[-1].stat().st_mtime if segments else 0.0
