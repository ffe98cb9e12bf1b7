"""One log of a stream as files: finds out what is missing, appends it, and notes how far that is.

Writes what the stream holds, also where it does not fit; judging is for whoever reads the files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import attrs
import msgspec
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError

from kvledger.storage.events.nats.errors import NothingToRead, StreamRefused, StreamUnavailable
from kvledger.storage.events.nats.messages import RETIRED, piece_of_message
from kvledger.storage.events.nats.retired import dropped_by_stream, record_of_message
from kvledger.storage.events.nats.stream import stored_message
from kvledger.storage.events.retirement import RETIREMENTS_NAME
from kvledger.storage.events.segment_file import decode_header

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.msg import Msg

    from kvledger.storage.events.nats.connection import Connection

__all__ = ["LOCK_NAME", "LogMirror"]

LOCK_NAME: Final = "mirror.lock"

_STATE: Final = "mirror.json"
_BATCH: Final = 256
_MAX_BYTES_UNDER_WAY: Final = 64 << 20
_SAVE_EVERY_S: Final = 1.0
_INACTIVE_AFTER_S: Final = 60.0


class _State(msgspec.Struct):
    """The message that came last, and the size of every segment."""

    stream_sequence: int
    segments: dict[str, int]


@attrs.define
class LogMirror:
    """Brings one log's directory up to date. The directory is locked."""

    connection: Connection
    subject: str
    directory: Path
    on_progress: Callable[[int], None]
    drop_reason: Literal["age", "size"] | None
    """Why the stream drops its oldest messages, None if it does not: then a missing beginning is damage."""
    _segments: dict[str, int] = attrs.field(factory=dict, init=False)
    _stream_sequence: int = attrs.field(default=0, init=False)
    _consumer_sequence: int = attrs.field(default=0, init=False)
    _saved_at: float = attrs.field(default=0.0, init=False)

    async def bring_up_to_date(self, num_messages: int) -> None:
        """Fetch what is missing of the `num_messages` that the stream holds. Raises as `mirror` does."""
        start = await self._confirmed_end()
        if start is None:
            self._discard()
            start = 0
        num_new = await self._fetch(start + 1, num_messages)
        if not self._segments:
            raise NothingToRead(
                f"{self.connection.address}: of {self.subject} the stream holds {num_new} messages and no beginning of "
                "a segment: the older ones were dropped (max_age, max_bytes, a purge). Read it where it was written"
            )

    async def _confirmed_end(self) -> int | None:
        """The stream sequence up to which the mirror holds the stream, or None if that is not known to be so."""
        try:
            state = msgspec.json.decode((self.directory / _STATE).read_bytes(), type=_State)
        except (OSError, msgspec.MsgspecError):
            return None
        message = await stored_message(self.connection, state.stream_sequence)
        if message is None or message.subject != self.subject or not state.segments:
            return None
        data = message.data or b""
        for name, num_bytes in state.segments.items():
            segment = self.directory / name
            if Path(name).name != name or not segment.is_file() or segment.stat().st_size < num_bytes:
                return None
        last = self.directory / max(state.segments)
        with last.open("rb") as file:
            file.seek(max(0, state.segments[last.name] - len(data)))
            if file.read(len(data)) != data:
                return None
        # What an interrupted run wrote behind that is fetched again.
        for segment in self.directory.glob("*.kvlog"):
            if segment.name not in state.segments:
                segment.unlink()
        os.truncate(last, state.segments[last.name])
        self._segments = dict(state.segments)
        return state.stream_sequence

    def _discard(self) -> None:
        for path in self.directory.iterdir():
            if path.name == LOCK_NAME:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        self._segments = {}

    async def _fetch(self, first_stream_sequence: int, num_messages: int) -> int:
        """Append every message from there on that the stream holds now; return how many there were."""
        connection, stream = self.connection, self.connection.address.stream
        configuration = ConsumerConfig(
            description="kvledger mirror",
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=first_stream_sequence,
            ack_policy=AckPolicy.NONE,
            mem_storage=True,
            num_replicas=1,
            inactive_threshold=_INACTIVE_AFTER_S,
        )
        jetstream = connection.jetstream
        try:
            subscription = await connection.unless_ended(
                jetstream.pull_subscribe(self.subject, stream=stream, config=configuration, pending_bytes_limit=0)
            )
            batch = max(1, min(_BATCH, _MAX_BYTES_UNDER_WAY // connection.max_payload))
            info = await connection.unless_ended(subscription.consumer_info())
            num_left = info.num_pending or 0
            num_fetched, num_already = 0, max(0, num_messages - num_left)
            self.on_progress(num_already)
            while num_left > 0:
                try:
                    messages = await connection.unless_ended(
                        subscription.fetch(min(batch, num_left), timeout=connection.answer_within_s)
                    )
                except StreamUnavailable as error:
                    if isinstance(error.__cause__, NatsTimeoutError) and not connection.ended.is_set():
                        raise StreamUnavailable(
                            f"{connection.address}: {num_left} messages of {self.subject} did not come; try again"
                        ) from error
                    raise
                num_left = self._write(messages)
                num_fetched += len(messages)
                self.on_progress(num_already + num_fetched)
            self._save()
            with contextlib.suppress(APIError, StreamUnavailable):
                await connection.unless_ended(jetstream.delete_consumer(stream, info.name))
        except APIError as error:
            raise StreamRefused(f"{connection.address}: {error.description}") from error
        return num_fetched

    def _write(self, messages: list[Msg]) -> int:
        """Append the messages' bytes, note how far that is, and return how many messages are to come."""
        name, pending = "", bytearray()
        for message in messages:
            self._consumer_sequence += 1
            if message.metadata.sequence.consumer != self._consumer_sequence:
                raise StreamUnavailable(f"{self.connection.address}: messages were lost on the way; try again")
            piece = piece_of_message(message.headers, message.data)
            if not isinstance(piece, str) and piece.is_header:
                self._append(name, pending)
                name, pending = piece.segment, bytearray()
                self._record_retired(message)
                self._begin(name)
            if not name and self._segments:
                name = max(self._segments)
            if name:
                pending += message.data
        self._append(name, pending)
        last = messages[-1].metadata
        self._stream_sequence = last.sequence.stream
        if time.monotonic() - self._saved_at >= _SAVE_EVERY_S:
            self._save()
        return last.num_pending

    def _record_retired(self, message: Msg) -> None:
        """Write down why sequences before this header block are missing, as far as that is known."""
        header = decode_header(message.data, self.subject)
        line = record_of_message((message.headers or {}).get(RETIRED, ""), header.log_id)
        covers_beginning = line is not None and msgspec.json.decode(line)["first_sequence"] == 1
        if not self._segments and header.first_sequence > 1 and not covers_beginning and self.drop_reason is not None:
            at_unix_ns = int(message.metadata.timestamp.timestamp() * 1e9)
            line = dropped_by_stream(header, self.drop_reason, at_unix_ns)
        if line is not None:
            with (self.directory / RETIREMENTS_NAME).open("ab") as file:
                file.write(line + b"\n")

    def _begin(self, name: str) -> None:
        if name not in self._segments:
            self._segments[name] = 0
            (self.directory / name).write_bytes(b"")

    def _append(self, name: str, data: bytes | bytearray) -> None:
        if not data:
            return
        with (self.directory / name).open("ab") as file:
            file.write(data)
        self._segments[name] += len(data)

    def _save(self) -> None:
        if not self._segments or not self._stream_sequence:
            return
        self._saved_at = time.monotonic()
        state = _State(self._stream_sequence, self._segments)
        unfinished = self.directory / f"{_STATE}.unfinished"
        unfinished.write_bytes(msgspec.json.encode(state))
        unfinished.replace(self.directory / _STATE)
