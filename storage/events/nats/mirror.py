"""Mirror the logs of a stream as files: fetch the messages that are missing in the files.

The mirror of a log is a directory of segments. The segments consist of the stream's messages in order, and nothing is
checked or corrected. Missing, repeated or foreign bytes are therefore found when the files are read. ``mirror.json``
next to the segments names a message of the stream. The mirror has all messages up to this message. If the stream no
longer has the same message, the mirror is deleted and fetched again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import attrs
import msgspec
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, DiscardPolicy, StreamConfig
from nats.js.errors import NotFoundError

from kvledger.lifecycle.untrusted import Undecodable, from_json
from kvledger.storage.events.files import (
    PRIVATE_DIRECTORY,
    is_regular_file,
    make_directory,
    num_bytes_of,
    open_for_writing,
    read_file,
    refused_link,
    write_file,
)
from kvledger.storage.events.nats.address import Access, StreamAddress
from kvledger.storage.events.nats.connection import connect
from kvledger.storage.events.nats.errors import NothingToRead
from kvledger.storage.events.nats.messages import RETIRED, record_of_message
from kvledger.storage.events.nats.stream import LogInStream, find_logs, subjects_of_log
from kvledger.storage.events.retirements import Retirement, write_retirement
from kvledger.storage.events.segment_file import NO_PREVIOUS_HASH, decode_header
from kvledger.storage.events.store import LogError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nats.aio.msg import Msg

    from kvledger.storage.events.nats.connection import Connection

__all__ = ["default_mirror_directory", "logs_in_stream", "mirror"]

_LOCK_NAME: Final = "mirror.lock"
_NOTE_NAME: Final = "mirror.json"
_FILE: Final = 0o600
_LOG_ID: Final = re.compile(r"[0-9a-f]{32}")
_BATCH: Final = 256
_MAX_BYTES_UNDER_WAY: Final = 64 << 20
_NOTE_EVERY_S: Final = 1.0
_INACTIVE_AFTER_S: Final = 60.0


def default_mirror_directory(address: StreamAddress) -> Path:
    """Return the default directory for mirrors of this stream. It is in the user's cache directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    host = address.hosts[0].replace(":", "-").strip("[]")
    return cache / "kvledger" / "nats" / host / address.stream


def logs_in_stream(address: StreamAddress, *, access: Access | None = None) -> list[LogInStream]:
    """Return the logs in the stream, in the order in which they were begun. Raises the errors of `mirror`."""

    async def find() -> list[LogInStream]:
        async with connect(address, access or Access.from_environment(), "kvledger ship --list") as connection:
            return await find_logs(connection, address.log_id or "")

    return asyncio.run(find())


def mirror(
    address: StreamAddress,
    directory: Path | None = None,
    *,
    access: Access | None = None,
    newest: bool = False,
    on_progress: Callable[[int, int], None] = lambda _num_messages, _num_messages_in_all: None,
    on_skipped: Callable[[str], None] = lambda _reason: None,
) -> list[Path]:
    """Update the mirror of the log in `address`, or of all logs in the stream. Return the directories of the logs.

    A run continues where an interrupted run stopped.

    Args:
        address: the stream. If it has a log id or the beginning of one, only this log is mirrored.
        directory: gets a folder for each log, which only the owner can read. Default: `default_mirror_directory`.
        access: credentials. Default: from the environment.
        newest: whether to mirror only the logs of the newest engine start.
        on_progress: called repeatedly with two numbers: the messages mirrored so far, and all messages.
        on_skipped: called with the reason if one of several logs cannot be read.

    Raises:
        StreamRefused: credentials or permissions are wrong, or the stream is missing. Also if no log's id,
            or more than one, begins with the log id in `address`.
        StreamUnavailable: the servers do not answer.
        NothingToRead: the stream has no header block of any log that was to be mirrored.
        LogError: a log's folder in `directory` exists and is not a mirror.
        OSError: the mirror cannot be written.
    """
    directory = default_mirror_directory(address) if directory is None else directory

    async def fetch() -> list[Path]:
        async with connect(address, access or Access.from_environment(), "kvledger mirror") as connection:
            subjects = await _subjects(connection, newest=newest)
            configuration = (await connection.jetstream.stream_info(address.stream)).config
            fetched: list[Path] = []
            num_all, num_done = sum(subjects.values()), 0
            for subject, num_messages in sorted(subjects.items()):

                def count(num: int, before: int = num_done) -> None:
                    on_progress(min(num_all, before + num), num_all)

                try:
                    log = _folder_of(subject, directory)
                    with _locked(log):
                        await _LogMirror(connection, configuration, subject, log, count).bring_up_to_date(num_messages)
                    fetched.append(log)
                except NothingToRead as error:
                    if len(subjects) == 1:
                        raise
                    on_skipped(str(error))
                num_done += num_messages
                on_progress(num_done, num_all)
            if not fetched:
                raise NothingToRead(f"{address}: no log of the stream can be read")
            return fetched

    return asyncio.run(fetch())


def _of_newest_start(logs: Sequence[LogInStream]) -> Sequence[LogInStream]:
    """Return the logs of the newest engine start. `logs` are in the order in which they were begun.

    These are the newest log of a scheduler, the other logs of the same engine, and all logs that were begun later. A
    later log of another engine is from a start that failed before its scheduler began a log.
    """
    headers = [{} if log.header is None else log.header.header for log in logs]
    last = max((at for at, header in enumerate(headers) if header.get("worker_rank") is None), default=0)
    engine = headers[last].get("engine_id")
    return [log for at, log in enumerate(logs) if at >= last or (engine and headers[at].get("engine_id") == engine)]


async def _subjects(connection: Connection, *, newest: bool) -> dict[str, int]:
    """Return subject → number of messages, for the logs that the address and `newest` select."""
    wanted = connection.address.log_id
    subjects = await subjects_of_log(connection, wanted or "")
    ids = sorted(subject.rpartition(".")[2] for subject in subjects)
    if not subjects:
        what = "no log" if wanted is None else f"no log whose id begins with {wanted}"
        raise connection.refused(f"the stream holds {what}; 'kvledger ship --list' lists the logs in it")
    if wanted is not None and len(subjects) > 1:
        raise connection.refused(
            f"several logs have an id that begins with {wanted} ({', '.join(ids)}); give more digits of the id"
        )
    if len(set(ids)) < len(ids):
        twice = sorted({log_id for log_id in ids if ids.count(log_id) > 1})
        raise connection.refused(f"the stream has log {', '.join(twice)} under several subjects; purge all but one")
    if newest:
        return {log.subject: log.num_messages for log in _of_newest_start(await find_logs(connection, wanted or ""))}
    return subjects


def _folder_of(subject: str, directory: Path) -> Path:
    """Return the mirror's directory for the log of `subject`. Raises `NothingToRead` if the subject has no log id."""
    log_id = subject.rpartition(".")[2]
    if not _LOG_ID.fullmatch(log_id):  # a path could lead out of the directory
        raise NothingToRead(f"subject {subject!r} does not end with a log id of 32 hex digits; delete its messages")
    return directory / log_id


@contextlib.contextmanager
def _locked(log: Path) -> Iterator[None]:
    """Lock the mirror of one log. Another run that mirrors the same log waits until the context ends."""
    if log.is_symlink():
        raise refused_link(log)
    if log.is_dir() and not is_regular_file(log / _LOCK_NAME) and any(log.iterdir()):
        raise LogError(f"{log}: is not a mirror and would be overwritten; give another directory for the mirrors")
    make_directory(log, durable=False, mode=PRIVATE_DIRECTORY)
    descriptor = open_for_writing(log / _LOCK_NAME, os.O_RDWR | os.O_CREAT, _FILE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class _Note(msgspec.Struct):
    """How far a mirror got. `stream_sequence` is the number that the stream gave to the mirror's last message.

    `segments` is segment name → number of bytes.
    """

    stream_sequence: int
    segments: dict[str, int]


@attrs.define
class _LogMirror:
    """Updates the mirror of one log: appends missing messages without a check, and records how far the mirror got."""

    connection: Connection
    configuration: StreamConfig
    subject: str
    directory: Path
    on_progress: Callable[[int], None]
    _segments: dict[str, int] = attrs.field(factory=dict, init=False)
    _consumer_sequence: int = attrs.field(default=0, init=False)
    _noted_at: float = attrs.field(default=0.0, init=False)

    async def bring_up_to_date(self, num_messages: int) -> None:
        """Fetch the log's missing messages. The stream has `num_messages` of the log. Raises the errors of `mirror`."""
        start = await self._confirmed_end()
        if not start:
            self._discard()
        num_new = await self._fetch(start + 1, num_messages)
        if not self._segments:
            raise NothingToRead(
                f"{self.connection.address}: the stream holds {num_new} messages of {self.subject}, but no beginning "
                "of a segment, because older messages were dropped (max_age, max_bytes or a purge); read the log on "
                "the host that wrote it"
            )

    async def _confirmed_end(self) -> int:
        """Find the message up to which the mirror is known to match the stream. Return its number in the stream.

        Bytes after this message are removed from the mirror. 0: there is no such message.
        """
        try:
            note = from_json(read_file(self.directory / _NOTE_NAME), _Note)
        except (OSError, Undecodable):
            return 0
        try:
            message = await self.connection.jetstream.get_msg(self.connection.address.stream, seq=note.stream_sequence)
        except NotFoundError:
            return 0
        if message.subject != self.subject or not note.segments:
            return 0
        for name, num_bytes in note.segments.items():
            segment = self.directory / name
            if Path(name).name != name or not is_regular_file(segment) or num_bytes_of(segment) < num_bytes:
                return 0
        last, data = self.directory / max(note.segments), message.data or b""
        end = note.segments[last.name]
        with os.fdopen(open_for_writing(last, os.O_RDWR), "r+b") as file:
            file.seek(max(0, end - len(data)))
            if file.read(len(data)) != data:
                return 0
            # An interrupted run wrote the rest, which is fetched again.
            for segment in self.directory.glob("*.kvlog"):
                if segment.name not in note.segments:
                    segment.unlink()
            file.truncate(end)
        self._segments = dict(note.segments)
        return note.stream_sequence

    def _discard(self) -> None:
        for path in self.directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != _LOCK_NAME:
                path.unlink()

    async def _fetch(self, first_stream_sequence: int, num_messages: int) -> int:
        """Fetch and append the log's messages from number `first_stream_sequence` on. Return how many were fetched."""
        connection, stream = self.connection, self.connection.address.stream
        wanted = ConsumerConfig(
            description="kvledger mirror",
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=first_stream_sequence,
            ack_policy=AckPolicy.NONE,
            mem_storage=True,
            num_replicas=1,
            inactive_threshold=_INACTIVE_AFTER_S,
        )
        jetstream = connection.jetstream
        # A push consumer would need more permissions, and nats-py answers its flow control four times a second.
        consumer = await jetstream.pull_subscribe(self.subject, stream=stream, config=wanted, pending_bytes_limit=0)
        batch = max(1, min(_BATCH, _MAX_BYTES_UNDER_WAY // connection.client.max_payload))
        info = await consumer.consumer_info()
        num_left, num_fetched = info.num_pending or 0, 0
        num_already = max(0, num_messages - num_left)
        self.on_progress(num_already)
        while num_left > 0:
            try:
                messages = await consumer.fetch(min(batch, num_left), timeout=connection.answer_within_s)
            except NatsTimeoutError as error:
                raise connection.unavailable(
                    f"{num_left} messages of {self.subject} did not arrive in time; try again"
                ) from error
            num_left = self._write(messages)
            num_fetched += len(messages)
            self.on_progress(num_already + num_fetched)
        with contextlib.suppress(NatsError):
            await jetstream.delete_consumer(stream, info.name)
        return num_fetched

    def _write(self, messages: list[Msg]) -> int:
        """Append the messages' bytes and record how far the mirror got. Return how many messages are left to fetch."""
        name, pending = max(self._segments, default=""), bytearray()
        for message in messages:
            self._consumer_sequence += 1
            if message.metadata.sequence.consumer != self._consumer_sequence:
                raise self.connection.unavailable("messages were lost in transit; try again")
            record = record_of_message(message.headers, message.data)
            if not isinstance(record, str) and record.is_header:
                self._append(name, pending)
                name, pending = record.segment, bytearray()
                self._write_retirement(message)
                self._segments.setdefault(name, 0)
            if name:
                pending += message.data
        self._append(name, pending)
        last = messages[-1].metadata
        if time.monotonic() - self._noted_at >= _NOTE_EVERY_S or not last.num_pending:
            self._write_note(last.sequence.stream)
        return last.num_pending or 0

    def _write_retirement(self, message: Msg) -> None:
        """If events before the header block in `message` are missing and the reason is known, record the reason."""
        header = decode_header(message.data, self.subject)
        try:
            retirement = from_json((message.headers or {}).get(RETIRED, ""), Retirement)
            known = retirement if retirement.log_id == header.log_id else None
        except Undecodable:
            known = None
        is_beginning = not self._segments and header.first_sequence > 1
        reason = _reason_to_drop(self.configuration)
        if is_beginning and reason is not None and (known is None or known.first_sequence > 1):
            known = Retirement(
                log="",
                log_id=header.log_id,
                segment="",
                first_sequence=1,
                last_sequence=header.first_sequence - 1,
                previous_head_hash=NO_PREVIOUS_HASH.hex(),
                head_hash=header.previous_head_hash.hex(),
                num_bytes=0,
                reason=reason,
                retired_at_unix_ns=int(message.metadata.timestamp.timestamp() * 1e9),
            )
        if known is not None:
            write_retirement(self.directory, known)

    def _append(self, name: str, data: bytes | bytearray) -> None:
        if data:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            with os.fdopen(open_for_writing(self.directory / name, flags, _FILE), "ab") as file:
                file.write(data)
            self._segments[name] += len(data)

    def _write_note(self, stream_sequence: int) -> None:
        if not self._segments:
            return
        self._noted_at = time.monotonic()
        unfinished = self.directory / f"{_NOTE_NAME}.unfinished"
        write_file(unfinished, msgspec.json.encode(_Note(stream_sequence, self._segments)), durable=False)
        unfinished.replace(self.directory / _NOTE_NAME)


def _reason_to_drop(configuration: StreamConfig) -> Literal["age", "size"] | None:
    """Return why a stream with this configuration drops its oldest messages; None if it drops none."""
    if configuration.max_age:
        return "age"
    is_bounded = (configuration.max_bytes or -1) > 0 or (configuration.max_msgs or -1) > 0
    return "size" if is_bounded and configuration.discard == DiscardPolicy.OLD else None
