"""The stream in NATS: create and check it, list its logs, find the last message of each log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import attrs
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from kvledger.storage.events.nats.messages import (
    SUBJECT_PREFIX,
    Record,
    message_headers,
    num_message_bytes,
    record_of_message,
)
from kvledger.storage.events.segment_file import SegmentHeader, decode_header
from kvledger.storage.events.store import LogDamaged, LogTooNew

if TYPE_CHECKING:
    from kvledger.storage.events.nats.connection import Connection

__all__ = [
    "LogInStream",
    "check_capacity",
    "ensure_stream",
    "find_logs",
    "last_record",
    "new_stream",
    "subjects_of_log",
    "warnings_about",
]

_SUBJECTS: Final = f"{SUBJECT_PREFIX}.*.*"
_MAX_SUBJECTS: Final = 100_000
"""Maximum number of subjects that STREAM.INFO lists at once (nats-server's JSMaxSubjectDetails)."""
_LOG_ID_DIGITS: Final = 32
_STORED_BYTES: Final = 256
"""Upper bound in bytes of what a stored message takes in addition to the size of the message.

This is for the header with the expected position, the subject and the server's own record."""
_MAX_RESERVE_BYTES: Final = 16 << 20


@attrs.frozen
class LogInStream:
    """One log of a stream. `num_messages` is the number of its frames and header blocks.

    `header` is the header block in the log's first message; None: that message has no readable header block. `last` is
    the record in the log's last message; None: that message cannot be read, for example because no shipper wrote it.
    """

    log_id: str
    label: str
    subject: str
    num_messages: int
    header: SegmentHeader | None = None
    last: Record | None = None
    last_stream_sequence: int = 0


def new_stream(
    *,
    num_replicas: int = 1,
    max_age_s: float = 0,
    max_bytes: int = 0,
    keeps_newest: bool = False,
    duplicate_window_s: float = 120,
) -> StreamConfig:
    """Return the configuration for a new stream. 0 for `max_age_s` or `max_bytes` means no limit.

    When `max_bytes` is reached, the stream refuses new messages, and shippers wait. With `keeps_newest`, the stream
    drops its oldest messages instead.
    """
    return StreamConfig(
        description="kvledger: event logs, one subject per log, one message per frame",
        subjects=[_SUBJECTS],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD if keeps_newest else DiscardPolicy.NEW,
        num_replicas=num_replicas,
        max_age=max_age_s,
        max_bytes=max_bytes or -1,
        duplicate_window=min(duplicate_window_s, max_age_s or duplicate_window_s),
    )


async def ensure_stream(connection: Connection, new: StreamConfig | None) -> StreamConfig:
    """Return the stream's configuration. Create a missing stream with the configuration `new`.

    Raises:
        StreamRefused: the stream is missing and `new` is None, or the stream's configuration would lose messages.
    """
    name = connection.address.stream
    try:
        info = await connection.jetstream.stream_info(name)
    except NotFoundError:
        if new is None:
            raise connection.refused(
                f"there is no stream {name}; create it as in docs/fleet.md, or with --create-stream"
            ) from None
        info = await connection.jetstream.add_stream(new, name=name)
    problems = "; ".join(_problems(info.config))
    if problems:
        raise connection.refused(f"the stream cannot hold logs: {problems}")
    return info.config


def _problems(configuration: StreamConfig) -> Iterator[str]:
    if not any(_covers(subject) for subject in configuration.subjects or []):
        yield f"it does not accept the subjects {_SUBJECTS}"
    if configuration.retention != RetentionPolicy.LIMITS:
        yield f"its retention is '{configuration.retention}', which deletes messages after reading; set it to 'limits'"
    if configuration.no_ack:
        yield "its setting no_ack is on, so it does not acknowledge messages; set no_ack to false"
    if configuration.max_msgs_per_subject > 0:
        limit = configuration.max_msgs_per_subject
        yield f"max_msgs_per_subject={limit} drops the beginning of every log; set it to -1"
    if configuration.sealed:
        yield "it is sealed"


def warnings_about(configuration: StreamConfig) -> Iterator[str]:
    """Yield warnings about a stream's configuration."""
    is_bounded = (configuration.max_bytes or -1) > 0 or (configuration.max_msgs or -1) > 0
    if is_bounded and configuration.discard == DiscardPolicy.OLD:
        yield "the stream drops its oldest messages when it is full, because its discard policy is 'old'"
    if configuration.storage == StorageType.MEMORY:
        yield "the stream is stored in memory, so its logs are lost when its servers restart"
    if configuration.num_replicas == 1:
        yield "the stream has one replica, so its logs are lost if that server loses its disk"
    if 0 < configuration.duplicate_window < 1:
        yield (
            "the duplicate window is under 1 second, so the server recognises a repeated message only by the message "
            "before it, not by its id"
        )


def _covers(subject: str) -> bool:
    """Whether a stream's subject matches the subject of every log."""
    wanted, given = _SUBJECTS.split("."), subject.split(".")
    if given[-1] == ">":
        wanted, given = wanted[: len(given) - 1], given[:-1]
    return len(wanted) == len(given) and all(two in {"*", one} for one, two in zip(wanted, given, strict=True))


async def check_capacity(connection: Connection, configuration: StreamConfig, records: Sequence[Record]) -> None:
    """Raise `StreamUnavailable` if the records do not fit into a stream that refuses messages when it is full.

    nats-server 2.9 does not count its own overhead. If a message just fits, the server accepts it and then drops the
    stream's oldest message, most likely a log's header block. A shipper must therefore leave some space free. The check
    also keeps a reserve for messages that other shippers send meanwhile.
    """
    bound = configuration.max_bytes or -1
    if bound <= 0 or configuration.discard == DiscardPolicy.OLD:
        return
    used = (await connection.jetstream.stream_info(connection.address.stream)).state.bytes
    needed = sum(num_message_bytes(message_headers(record), record.data) + _STORED_BYTES for record in records)
    if used + needed > bound - min(bound // 20, _MAX_RESERVE_BYTES):
        raise connection.unavailable(
            f"the stream is full (max_bytes {bound}) and accepts no messages; raise max_bytes, or purge logs that are "
            "no longer needed"
        )


async def subjects_of_log(connection: Connection, log_id: str) -> dict[str, int]:
    """Return subject → number of messages, for the logs whose id begins with `log_id` ("": for all logs)."""
    stream = connection.address.stream
    pattern = f"{SUBJECT_PREFIX}.*.{log_id if len(log_id) == _LOG_ID_DIGITS else '*'}"
    try:
        found = (await connection.jetstream.stream_info(stream, pattern)).state.subjects or {}
    except NotFoundError:
        raise connection.refused(f"there is no stream {stream}") from None
    if len(found) >= _MAX_SUBJECTS:
        raise connection.refused(f"the stream holds {_MAX_SUBJECTS} logs or more; give the complete id of one log")
    return {subject: num for subject, num in found.items() if subject.rpartition(".")[2].startswith(log_id)}


async def last_record(connection: Connection, subject: str) -> tuple[int, Record | None]:
    """Return the number of a subject's last message in the stream, and its record. 0 and None: no message is found.

    Raises:
        LogDamaged: the message was not written by a shipper.
    """
    stream = connection.address.stream
    try:
        message = await connection.jetstream.get_last_msg(stream, subject)
    except NotFoundError:
        return 0, None
    record = record_of_message(message.headers, message.data or b"")
    if isinstance(record, str):
        raise LogDamaged(
            f"{connection.address}: message {message.seq} on {subject} was not written by a shipper: {record}; find "
            f"out who wrote the message; 'nats stream rmm {stream} {message.seq}' removes it"
        )
    return message.seq or 0, record


async def find_logs(connection: Connection, log_id: str = "") -> list[LogInStream]:
    """Return the logs whose id begins with `log_id` ("": all logs), the newest last.

    This takes two requests to the server for each log.
    """
    logs = []
    for subject, num_messages in (await subjects_of_log(connection, log_id)).items():
        label, _, whole_id = subject.removeprefix(f"{SUBJECT_PREFIX}.").rpartition(".")
        header = await _first_header(connection, subject)
        try:
            number, last = await last_record(connection, subject)
        except (LogDamaged, LogTooNew):
            number, last = 0, None
        logs.append(LogInStream(whole_id, label, subject, num_messages, header, last, number))
    return sorted(logs, key=lambda log: (_opened_at(log), log.last_stream_sequence))


async def _first_header(connection: Connection, subject: str) -> SegmentHeader | None:
    """Return the header block in a subject's first message. None: there is no readable header block."""
    try:
        message = await connection.jetstream.get_msg(connection.address.stream, seq=1, subject=subject, next=True)
        return decode_header(message.data or b"", subject)
    except (NotFoundError, LogDamaged, LogTooNew):
        return None


def _opened_at(log: LogInStream) -> int:
    opened_at = None if log.header is None else log.header.header.get("opened_at_unix_ns")
    return opened_at if isinstance(opened_at, int) else 0
