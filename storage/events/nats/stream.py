"""The stream itself: make it, check that it keeps what it is given, see which logs it holds and where each one ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import attrs
from nats.js.errors import APIError, NotFoundError

from kvledger.storage.events.errors import LogDamaged, LogTooNew
from kvledger.storage.events.nats.errors import StreamRefused, StreamUnavailable
from kvledger.storage.events.nats.messages import SUBJECT_PREFIX, Piece, piece_of_message
from kvledger.storage.events.segment_file import SegmentHeader, decode_header

if TYPE_CHECKING:
    from nats.js.api import RawStreamMsg

    from kvledger.storage.events.nats.connection import Connection

__all__ = [
    "CheckedStream",
    "LogInStream",
    "NewStream",
    "StoredPiece",
    "ensure_stream",
    "find_logs",
    "last_piece",
    "subjects_of_log",
]

_NS: Final = 1_000_000_000
_MAX_SUBJECTS_A_PAGE: Final = 100_000


@attrs.frozen
class NewStream:
    """How to make a stream that is missing. 0 means without a bound.

    With `max_bytes` and `keeps_newest=False` (the default) a full stream takes nothing more, and shippers wait; with
    True it drops its oldest messages.
    """

    num_replicas: int = 1
    max_age_s: float = 0
    max_bytes: int = 0
    keeps_newest: bool = False
    duplicate_window_s: float = 120

    def configuration(self, name: str) -> dict[str, object]:
        """The request to JetStream."""
        window_s = min(self.duplicate_window_s, self.max_age_s or self.duplicate_window_s)
        return {
            "name": name,
            "description": "kvledger: event logs, one subject a log, one message a frame",
            "subjects": [f"{SUBJECT_PREFIX}.*.*"],
            "retention": "limits",
            "storage": "file",
            "discard": "old" if self.keeps_newest else "new",
            "num_replicas": self.num_replicas,
            "max_age": int(self.max_age_s * _NS),
            "max_bytes": self.max_bytes or -1,
            "max_msgs": -1,
            "max_msgs_per_subject": -1,
            "max_msg_size": -1,
            "max_consumers": -1,
            "duplicate_window": int(window_s * _NS),
        }


@attrs.frozen
class StoredPiece:
    """A piece and the sequence number that the stream gave its message."""

    stream_sequence: int
    piece: Piece


@attrs.frozen
class LogInStream:
    """One log of a stream; `num_messages` are its frames and header blocks.

    `header` is that of the oldest segment whose beginning the stream still has; `last` is None if the last message is
    none of ours.
    """

    log_id: str
    label: str
    subject: str
    num_messages: int
    header: SegmentHeader | None = None
    last: Piece | None = None
    last_stream_sequence: int = 0


@attrs.frozen
class CheckedStream:
    """A stream that logs may be shipped into. `max_age_s` is 0 if it keeps messages for ever."""

    configuration: dict[str, Any]
    warnings: list[str]
    max_age_s: float


async def ensure_stream(connection: Connection, new: NewStream | None) -> CheckedStream:
    """Make the stream if it is missing and `new` says how, and check it.

    Raises:
        StreamRefused: it is missing, or would lose or mix up what it is given.
        StreamUnavailable: no answer.

    """
    name = connection.address.stream
    try:
        try:
            info = await connection.request(f"STREAM.INFO.{name}")
        except NotFoundError:
            if new is None:
                raise StreamRefused(
                    f"{connection.address}: there is no stream {name}; make it as docs/fleet.md says, or let "
                    "--create-stream do it"
                ) from None
            info = await connection.request(f"STREAM.CREATE.{name}", new.configuration(name))
    except APIError as error:
        raise StreamRefused(f"{connection.address}: {error.description}") from error
    configuration = info["config"]
    problems = list(_problems(configuration))
    if problems:
        raise StreamRefused(f"{connection.address}: the stream is not fit for logs: {'; '.join(problems)}")
    return CheckedStream(configuration, list(_warnings(configuration)), configuration.get("max_age", 0) / _NS)


def _problems(configuration: dict[str, Any]) -> Iterator[str]:
    if not any(_covers(subject) for subject in configuration.get("subjects") or []):
        yield f"it does not take the subjects {SUBJECT_PREFIX}.*.*"
    if configuration.get("retention", "limits") != "limits":
        yield f"its retention is '{configuration['retention']}', which deletes what was read; it must be 'limits'"
    if configuration.get("no_ack"):
        yield "it has no_ack, so nobody knows what arrived"
    if configuration.get("max_msgs_per_subject", -1) > 0:
        limit = configuration["max_msgs_per_subject"]
        yield f"max_msgs_per_subject={limit} drops the beginning of every log; make it -1"
    if configuration.get("sealed"):
        yield "it is sealed"


def _warnings(configuration: dict[str, Any]) -> Iterator[str]:
    is_bounded = configuration.get("max_bytes", -1) > 0 or configuration.get("max_msgs", -1) > 0
    if is_bounded and configuration.get("discard", "old") == "old":
        yield "when the stream is full it drops its oldest messages (discard 'old')"
    if configuration.get("storage") == "memory":
        yield "the stream lives in memory: what it holds is gone when its servers restart"
    if configuration.get("num_replicas", 1) == 1:
        yield "the stream has one replica: what it holds is as safe as that server's disk"
    if 0 < configuration.get("duplicate_window", 0) < _NS:
        yield "the duplicate window is under a second; repetitions are then recognised by the expected sequence alone"


def _covers(subject: str) -> bool:
    """Whether a stream's subject takes every log's subject."""
    tokens = subject.split(".")
    for wanted, given in zip((*SUBJECT_PREFIX.split("."), "*", "*"), tokens, strict=False):
        if given == ">":
            return True
        if given not in {"*", wanted}:
            return False
    return len(tokens) == len(SUBJECT_PREFIX.split(".")) + len(("label", "log_id"))


async def last_piece(connection: Connection, subject: str) -> StoredPiece | None:
    """Return the last message of a subject, None if the stream holds none.

    Raises:
        LogDamaged: it is none that a shipper writes.
        StreamUnavailable: no answer.

    """
    jetstream = connection.jetstream
    try:
        message = await connection.unless_ended(jetstream.get_last_msg(connection.address.stream, subject))
    except NotFoundError:
        await _check_empty(connection, subject)
        return None
    except APIError as error:
        raise StreamRefused(f"{connection.address}: {error.description}") from error
    piece = piece_of_message(message.headers, message.data or b"")
    if isinstance(piece, str):
        raise LogDamaged(
            f"{connection.address}: message {message.seq} on {subject} was not written by a shipper: {piece}. Find out "
            f"who did; 'nats stream rmm {connection.address.stream} {message.seq}' removes it"
        )
    return StoredPiece(message.seq or 0, piece)


async def _check_empty(connection: Connection, subject: str) -> None:
    """Make sure that a subject without a last message has no message.

    nats-server 2.9 finds no last message, and takes a first one, after the last one was deleted by hand. Who believes
    that ships the log a second time.
    """
    num_messages = (await _subjects(connection, subject)).get(subject, 0)
    if num_messages:
        raise StreamUnavailable(
            f"{connection.address}: the server counts {num_messages} messages on {subject} and finds no last one. Some "
            "versions do so after messages were deleted by hand; restart the server that leads the stream"
        )


async def stored_message(connection: Connection, stream_sequence: int) -> RawStreamMsg | None:
    """Return the message with this sequence number, None if the stream holds none (any more)."""
    jetstream = connection.jetstream
    try:
        return await connection.unless_ended(jetstream.get_msg(connection.address.stream, seq=stream_sequence))
    except NotFoundError:
        return None


async def subjects_of_log(connection: Connection, log_id: str) -> dict[str, int]:
    """Return the subjects (-> number of messages) of the logs whose id begins with `log_id`; "" for all."""
    last_token = log_id if len(log_id) == 32 else "*"  # noqa: PLR2004 - hex digits of a log id
    return {
        subject: num_messages
        for subject, num_messages in (await _subjects(connection, f"{SUBJECT_PREFIX}.*.{last_token}")).items()
        if subject.rpartition(".")[2].startswith(log_id)
    }


async def _subjects(connection: Connection, pattern: str) -> dict[str, int]:
    found: dict[str, int] = {}
    while True:
        body = {"subjects_filter": pattern, "offset": len(found)}
        try:
            info = await connection.request(f"STREAM.INFO.{connection.address.stream}", body)
        except NotFoundError:
            raise StreamRefused(f"{connection.address}: there is no stream {connection.address.stream}") from None
        page = (info.get("state") or {}).get("subjects") or {}
        found |= page
        if len(page) < _MAX_SUBJECTS_A_PAGE:
            return found


async def find_logs(connection: Connection, log_id: str = "") -> list[LogInStream]:
    """Return the logs whose id begins with `log_id` ("": all), the newest last. Two requests a log."""
    logs = []
    for subject, num_messages in (await subjects_of_log(connection, log_id)).items():
        label, _, whole_id = subject.removeprefix(f"{SUBJECT_PREFIX}.").rpartition(".")
        header = await _first_header(connection, subject)
        try:
            stored = await last_piece(connection, subject)
        except LogDamaged:
            stored = None
        last, number = (None, 0) if stored is None else (stored.piece, stored.stream_sequence)
        logs.append(LogInStream(whole_id, label, subject, num_messages, header, last, number))
    return sorted(logs, key=lambda log: (_opened_at(log), log.last_stream_sequence))


async def _first_header(connection: Connection, subject: str) -> SegmentHeader | None:
    """The header block that the subject begins with; None if it begins otherwise."""
    jetstream = connection.jetstream
    try:
        request = jetstream.get_msg(connection.address.stream, seq=1, subject=subject, next=True)
        message = await connection.unless_ended(request)
    except NotFoundError:
        return None
    try:
        return decode_header(message.data or b"", subject)
    except (LogDamaged, LogTooNew):
        return None


def _opened_at(log: LogInStream) -> int:
    opened_at = None if log.header is None else log.header.header.get("opened_at_unix_ns")
    return opened_at if isinstance(opened_at, int) else 0
