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
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvledger.storage.events.errors import LogError
from kvledger.storage.events.nats.address import Access, StreamAddress
from kvledger.storage.events.nats.connection import connect
from kvledger.storage.events.nats.errors import NothingToRead, StreamRefused
from kvledger.storage.events.nats.log_mirror import LOCK_NAME, LogMirror
from kvledger.storage.events.nats.retired import reason_to_drop
from kvledger.storage.events.nats.stream import LogInStream, find_logs, subjects_of_log

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

__all__ = ["default_mirror_directory", "logs_in_stream", "mirror"]

Answer = TypeVar("Answer")


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
        drop_reason = reason_to_drop((await connection.request(f"STREAM.INFO.{address.stream}"))["config"])
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
                    await LogMirror(connection, subject, log, count, drop_reason).bring_up_to_date(num_messages)
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
    if log.is_dir() and not (log / LOCK_NAME).exists() and any(log.iterdir()):
        raise LogError(f"{log}: is no mirror, and would be overwritten; give another directory for mirrors")
    log.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One run at a time; a second one waits, and then finds little to do."""
    descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
