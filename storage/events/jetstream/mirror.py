"""Logs of a stream as files: fetches what is missing, and leaves the judging to whoever reads the files.

A mirror is a directory of log directories. Its segments are the stream's messages one behind the other, so a hole, a
repetition or foreign bytes in the stream show as what they are. Beside the segments stands ``mirror.json``: how far the
mirror has come. It is believed only if the stream confirms it, else the mirror is discarded and fetched again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import attrs
import msgspec
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError

from kvledger.storage.events.errors import LogError
from kvledger.storage.events.jetstream.address import Access, StreamAddress
from kvledger.storage.events.jetstream.connection import Connection, connect
from kvledger.storage.events.jetstream.errors import NothingToRead, StreamRefused, StreamUnavailable
from kvledger.storage.events.jetstream.messages import piece_of_message
from kvledger.storage.events.jetstream.stream import LogInStream, find_logs, stored_message, subjects_of_log

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from nats.aio.msg import Msg

__all__ = ["default_mirror_directory", "logs_in_stream", "mirror"]

_STATE: Final = "mirror.json"
_LOCK: Final = "mirror.lock"
_BATCH: Final = 256
_MAX_BYTES_UNDER_WAY: Final = 64 << 20
_SAVE_EVERY_S: Final = 1.0
_INACTIVE_AFTER_S: Final = 60.0

Answer = TypeVar("Answer")


class _State(msgspec.Struct):
    """The message that came last, and the size of every segment."""

    stream_sequence: int
    segments: dict[str, int]


def default_mirror_directory(address: StreamAddress) -> Path:
    """Return where mirrors of this stream live: a folder of the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    host = address.hosts[0].replace(":", "-").strip("[]")
    return cache / "kvledger" / "nats" / host / address.stream


def mirror(
    address: StreamAddress,
    directory: Path | None = None,
    *,
    access: Access | None = None,
    newest: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    on_skipped: Callable[[str], None] | None = None,
) -> list[Path]:
    """Bring the mirror of the addressed log, or of every log of the stream, up to date; return the log directories.

    `directory` (default: `default_mirror_directory`) gets a folder for each log; folders are made for their owner only.
    With `newest` only the log that was opened last is fetched. `on_progress(num_messages, num_messages_in_all)` is
    called now and then; `on_skipped` is told of a log of several that cannot be read. An interrupted run is
    gone on with.

    Raises:
        StreamRefused: credentials, permissions, a missing stream, or a log id that is not in it, or not only once.
        StreamUnavailable: the servers do not answer.
        NothingToRead: the stream holds no beginning of a segment of the log.
        OSError: the mirror cannot be written.

    """
    directory = default_mirror_directory(address) if directory is None else directory
    work = _mirror(
        address,
        directory,
        access or Access.from_environment(),
        on_progress or (lambda _done, _all: None),
        on_skipped or (lambda _reason: None),
        newest=newest,
    )
    return _run(work)


def logs_in_stream(address: StreamAddress, *, access: Access | None = None) -> list[LogInStream]:
    """Return what logs the stream holds, the one opened last at the end. Raises like `mirror`."""

    async def find() -> list[LogInStream]:
        async with connect(address, access or Access.from_environment(), "kvledger ship --list") as connection:
            return await find_logs(connection, address.log_id or "")

    return _run(find())


def _run(work: Coroutine[object, object, Answer]) -> Answer:
    return asyncio.run(work)


async def _mirror(
    address: StreamAddress,
    directory: Path,
    access: Access,
    on_progress: Callable[[int, int], None],
    on_skipped: Callable[[str], None],
    *,
    newest: bool,
) -> list[Path]:
    async with connect(address, access, "kvledger mirror") as connection:
        subjects = await subjects_of_log(connection, address.log_id or "")
        _check_found(address, subjects)
        if newest and len(subjects) > 1:
            last = (await find_logs(connection, address.log_id or ""))[-1]
            subjects = {last.subject: last.num_messages}
        fetched: list[Path] = []
        num_all, num_done = sum(subjects.values()), 0
        for subject, num_messages in sorted(subjects.items()):
            log = directory / subject.rpartition(".")[2]
            _prepare(log)
            with _locked(log):
                before = num_done

                def count(num: int, before: int = before) -> None:
                    on_progress(min(num_all, before + num), num_all)

                try:
                    await _LogMirror(connection, subject, log, count).bring_up_to_date(num_messages)
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


def _check_found(address: StreamAddress, subjects: dict[str, int]) -> None:
    ids = [subject.rpartition(".")[2] for subject in subjects]
    if not subjects:
        what = "no log" if address.log_id is None else f"no log whose id begins with {address.log_id}"
        raise StreamRefused(f"{address}: the stream holds {what}; 'kvledger ship --list' shows what it holds")
    if address.log_id is not None and len(subjects) > 1:
        raise StreamRefused(f"{address}: several logs have such an id ({', '.join(sorted(ids))}); give more of it")
    if len(set(ids)) < len(ids):
        twice = sorted({log_id for log_id in ids if ids.count(log_id) > 1})
        raise StreamRefused(f"{address}: {', '.join(twice)} is there under several subjects; purge all but one of them")


def _prepare(log: Path) -> None:
    if log.is_dir() and not (log / _LOCK).exists() and any(log.iterdir()):
        raise LogError(f"{log}: is no mirror, and would be overwritten; give another directory for mirrors")
    log.mkdir(mode=0o700, parents=True, exist_ok=True)


@attrs.define
class _LogMirror:
    """Brings one log's directory up to date. The directory is locked."""

    connection: Connection
    subject: str
    directory: Path
    on_progress: Callable[[int], None]
    _segments: dict[str, int] = attrs.field(factory=dict, init=False)
    _stream_sequence: int = attrs.field(default=0, init=False)
    _consumer_sequence: int = attrs.field(default=0, init=False)
    _saved_at: float = attrs.field(default=0.0, init=False)

    async def bring_up_to_date(self, num_messages: int) -> None:
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
            if path.name == _LOCK:
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


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One run at a time; a second one waits, and then finds little to do."""
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
