"""Ship one log over one connection. The last message of the log's subject in the stream shows where to continue."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Final, Literal

import attrs

from kvledger.storage.events.nats.errors import StreamRefused, StreamUnavailable
from kvledger.storage.events.nats.messages import Record, subject_of
from kvledger.storage.events.nats.publisher import BatchResult, publish
from kvledger.storage.events.nats.stream import check_capacity, last_record, subjects_of_log
from kvledger.storage.events.nats.tail import LogTail, num_bytes_behind
from kvledger.storage.events.segment_file import segment_paths
from kvledger.storage.events.store import LogDamaged, LogError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nats.js.api import StreamConfig

    from kvledger.storage.events.nats.connection import Connection

__all__ = ["LogProgress", "Shipment"]

_FIRST_WINDOW: Final = 32
_MAX_WINDOW: Final = 512
_MAX_BATCH_BYTES: Final = 4 << 20
_MAX_FRUITLESS: Final = 8
_STANDBY_S: Final = 2.0
_RETRY_AFTER_S: Final = 10.0


@attrs.define
class LogProgress:
    """The state of shipping one log. It outlives a connection. A new connection first asks the stream for `last`.

    `num_frames` and `num_bytes` count what this process has shipped. `last` is the last record that is known to be in
    the stream. `lost` has events that were retired before they were shipped: first → last sequence number.

    `problem` says why no more of the log is shipped for now. `problem_kind` is one of:

    - `damaged`: the log's files, or its messages in the stream, are damaged.
    - `refused`: the server refused a message.
    - `skipped`: the log is older than the stream's limit `max_age`.
    - `unavailable`: the log's files cannot be read now.
    """

    directory: Path
    log_id: str = ""
    subject: str = ""
    num_frames: int = 0
    num_bytes: int = 0
    last: Record | None = None
    problem: str = ""
    problem_kind: Literal["", "damaged", "refused", "skipped", "unavailable"] = ""
    lost: dict[int, int] = attrs.field(factory=dict)


@attrs.define(eq=False)
class Shipment:
    """Ships the log in `progress.directory` over one connection. Call `start`, then `advance` repeatedly."""

    connection: Connection
    configuration: StreamConfig
    label: str
    progress: LogProgress
    remark: Callable[[str], None]
    """Called with messages for the user. The same message can come several times."""
    resume_at: float = attrs.field(default=0.0, init=False)
    """Time (`time.monotonic`) until which this shipper can pause, because another shipper ships the log."""
    retry_at: float = attrs.field(default=math.inf, init=False)
    """Time (`time.monotonic`) at which to call `start` again. Infinite: `start` need not be called again."""
    _tail: LogTail = attrs.field(init=False)
    _stream_sequence: int = attrs.field(default=0, init=False)
    _window: int = attrs.field(default=_FIRST_WINDOW, init=False)
    _num_fruitless: int = attrs.field(default=0, init=False)
    _end_seen: tuple[int, int] = attrs.field(default=(0, 0), init=False)
    _num_same_ends: int = attrs.field(default=0, init=False)

    async def start(self) -> None:
        """Find the log's last message in the stream. A problem of the log is recorded in `progress.problem`."""
        self.retry_at = math.inf
        self.progress.problem = self.progress.problem_kind = ""
        with self._problems():
            self._tail = LogTail(self.progress.directory)
            await self._find_place()
            max_age_s = self.configuration.max_age
            if self.progress.last is None and max_age_s and _age_s(self.progress.directory) > max_age_s:
                self._stop("skipped", "the last write to the log is older than the stream's max_age for messages")

    async def advance(self) -> bool:
        """Ship one batch of records. Return False if there was nothing to ship.

        Raises:
            StreamUnavailable: the stream is full, or the server does not answer.
        """
        if self.progress.problem:
            return False
        before = self._tail.last
        records: list[Record] = []
        with self._problems():
            records = self._tail.read(self._window, _MAX_BATCH_BYTES)
        self._note_lost()
        if not records:
            return False
        await check_capacity(self.connection, self.configuration, records)
        result = await publish(self.connection, self.progress.subject, records, self._stream_sequence)
        stored = records[: result.num_stored]
        if stored:
            self._stream_sequence, self.progress.last = result.stream_sequence, stored[-1]
            self.progress.num_frames += sum(not record.is_header for record in stored)
            self.progress.num_bytes += sum(len(record.data) for record in stored)
        if len(stored) == len(records):
            self._window = min(_MAX_WINDOW, self._window * 2)
            self._num_fruitless = 0
        elif result.problem is not None:
            if isinstance(result.problem, StreamUnavailable):
                raise result.problem
            self._stop("refused", str(result.problem))
        else:
            self._window = max(1, result.num_stored)
            self._num_fruitless = 0 if stored else self._num_fruitless + 1
            with self._problems():
                await self._find_place_again(result, records, before)
        return True

    def check_end(self, *, is_final: bool) -> None:
        """Check whether the log ends after the last record, or is damaged there. Call after `advance` returned False.

        Damage stops the shipping of the log. If `is_final` is False, the log may be growing, so there are exceptions:

        - An incomplete last frame is only reported to `remark`.
        - If several successive calls find the log's end unchanged, only the first of these calls reads the frames.
        """
        if self.progress.problem:
            return
        if not self.progress.directory.exists():
            self.remark(f"the log was deleted here; it was shipped up to event {self._tail.next_sequence - 1}")
            return
        with self._problems():
            last = self._tail.last
            end = (0 if last is None else last.next_sequence, num_bytes_behind(self.progress.directory, last))
            self._num_same_ends = self._num_same_ends + 1 if end == self._end_seen else 0
            self._end_seen = end
            damage = self._tail.trouble() if is_final or self._num_same_ends == 1 else None
            if damage is None:
                return
            text = f"{damage.kind} in {damage.segment} at byte {damage.offset}: {damage.detail}"
            if damage.kind == "torn_tail" and not is_final:
                self.remark(f"{text}; waiting for the log's writer")
            else:
                self._stop("damaged", f"{text}; shipped up to event {self._tail.next_sequence - 1}")

    async def _find_place(self) -> None:
        """Find the log's last message in the stream, even if its subject has another label than this shipper's."""
        tail, progress = self._tail, self.progress
        progress.log_id = tail.log_id
        known = list(await subjects_of_log(self.connection, tail.log_id))
        wanted = subject_of(self.label, tail.log_id)
        progress.subject = known[0] if known else wanted
        if len(known) > 1:
            raise LogDamaged(f"the stream has this log under several subjects ({', '.join(known)}); purge all but one")
        if progress.subject != wanted:
            self.remark(f"the stream has this log under {progress.subject}, so it is not shipped to {wanted}")
        self._stream_sequence, progress.last = await last_record(self.connection, progress.subject)
        if known and progress.last is None:
            # nats-server 2.9 finds none after the last one was deleted by hand. The log would be shipped twice.
            raise self.connection.unavailable(
                f"the server counts messages on {progress.subject} but finds no last message. Some server versions do "
                "so after messages were deleted by hand; restart the server that leads the stream"
            )
        tail.seek(progress.last)

    async def _find_place_again(self, result: BatchResult, records: list[Record], before: Record | None) -> None:
        """Find the log's last message in the stream again, after the server refused a record or knew it already.

        `result` is the result of publishing `records`. `before` is the record before them.
        """
        if self._num_fruitless > _MAX_FRUITLESS:
            raise self.connection.unavailable(
                f"the last message of {self.progress.subject} keeps changing, because another process writes there"
            )
        # A repeated record should be there; otherwise the stream should end where expected.
        here = [before, *records][result.num_stored + result.is_repetition]
        await self._find_place()
        there = _position(self.progress.last)
        if result.is_repetition and there < _position(here):
            raise self.connection.unavailable(
                f"messages of {self.progress.subject} were deleted, and the server rejects the same messages as "
                "duplicates until its duplicate window has passed"
            )
        if result.is_repetition or there > _position(here):
            self.resume_at = time.monotonic() + _STANDBY_S
            self.remark("another shipper ships this log, so this shipper pauses; no message is stored twice")

    def _note_lost(self) -> None:
        for first, last in self._tail.lost.items():
            self.progress.lost[first] = last
            self.remark(f"events {first} to {last} were retired before they were shipped, so the stream lacks them")

    @contextlib.contextmanager
    def _problems(self) -> Iterator[None]:
        """If the log has a problem, stop shipping this log only. If its files cannot be read, retry them later."""
        try:
            yield
        except (StreamUnavailable, StreamRefused, TimeoutError, ConnectionError):
            raise  # A problem of the connection.
        except LogError as error:
            self._stop("damaged", str(error))
        except OSError as error:
            self._stop("unavailable", f"the log's files cannot be read: {error}")
            self.retry_at = time.monotonic() + _RETRY_AFTER_S

    def _stop(self, kind: Literal["damaged", "refused", "skipped", "unavailable"], reason: str) -> None:
        self.progress.problem_kind, self.progress.problem = kind, reason
        self.remark(f"shipping stopped: {reason}")


def _position(record: Record | None) -> tuple[str, int]:
    return ("", 0) if record is None else (record.segment, record.end)


def _age_s(directory: Path) -> float:
    segments = segment_paths(directory)
    return time.time() - segments[-1].lstat().st_mtime if segments else 0.0
