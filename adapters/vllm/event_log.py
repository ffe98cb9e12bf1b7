"""Opens the log of one engine start: creates the log's directory and header. Warns operators if writing fails."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import re
import shutil
import time
from pathlib import Path
from typing import Final

import attrs

from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.log_settings import LogSettings, unwritable
from kvledger.adapters.vllm.messages import messages
from kvledger.adapters.vllm.snapshots import SnapshotProcess
from kvledger.lifecycle import Core, LedgerConfiguration, log_header
from kvledger.lifecycle.events import LOG_BEFORE
from kvledger.storage.events import (
    MAX_EXCESS_SEGMENTS,
    MIN_LOG_SEGMENTS,
    BacklogEventStore,
    EventStore,
    HowEnded,
    LateEventStore,
    LogError,
    Maintenance,
    MemoryEventStore,
    Retirement,
    SegmentEventStore,
    glance_at_ending,
    make_room,
    retire_logs,
)
from kvledger.storage.events.files import RefusedFile, directories_in, is_full
from kvledger.storage.events.retention import free_bytes, num_log_bytes
from kvledger.storage.events.segment_file import segment_paths

_SECONDS_BETWEEN_MESSAGES: Final = 60.0


_WORKER: Final = "-worker-"


@attrs.frozen
class WorkerOfLog:
    """A worker that writes its own log next to the scheduler's."""

    engine_id: str
    """vLLM's id of the engine, the same in all logs of the engine."""
    rank: int

    @property
    def suffix(self) -> str:
        """The last part of the name of the log's directory."""
        return f"{_WORKER}{self.rank}-of-{re.sub('[^A-Za-z0-9]', '', self.engine_id)[:12]}"


@attrs.frozen
class OpenedLog:
    """The store that writes a log, and the log's directory (None if the log is in memory)."""

    store: EventStore
    directory: Path | None
    remarks: tuple[str, ...] = ()
    """Remarks about the previous log, to be recorded in this log."""

    def close(self, expected_sequence: int | None = None) -> None:
        """Close the store, and write an error message for operators if some events are not in the log.

        `expected_sequence` is the next sequence number by the ledger's own count; see `EventStore.close`.
        """
        self.store.close(expected_sequence)
        if expected_sequence is not None and self.store.next_sequence < expected_sequence:
            messages.error(
                "recorded events never reached the log, because of a bug of kvledger; keep this log and report the bug",
                log=str(self.directory or "memory"),
                num_events_lost=expected_sequence - self.store.next_sequence,
            )
        if isinstance(self.store, BacklogEventStore) and self.store.num_events_lost:
            messages.error(
                "the log lacks events that could not be written; `kvledger verify` names them",
                log=str(self.directory),
                num_events_lost=self.store.num_events_lost,
            )


def open_event_log(
    core: Core,
    settings: LogSettings,
    configuration: LedgerConfiguration,
    *,
    worker: WorkerOfLog | None = None,
    **of_writer: object,
) -> OpenedLog:
    """Create the log of this engine start, and begin to keep `log_dir` within its limits.

    `worker` is the worker that writes the log; None if the scheduler writes it. `of_writer` are additional entries of
    the header.

    Raises:
        ConfigurationError: `log_dir` cannot be written. A full disk does not raise this error: the log then begins
            when there is room.
    """
    header = {
        **log_header(core, configuration),
        "vllm_version": versions.vllm_version(),
        "opened_at_unix_ns": time.time_ns(),
        "process_id": os.getpid(),
        **of_writer,
        **({} if worker is None else {"engine_id": worker.engine_id, "worker_rank": worker.rank}),
    }
    if settings.log_dir is None:
        return OpenedLog(MemoryEventStore(header, max_bytes=settings.memory_log_bytes), None)
    settings.refuse_log_dir()
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    remarks = () if worker else _remarks_on_last(settings.log_dir.absolute())
    suffix = worker.suffix if worker else ""
    directory = settings.log_dir.absolute() / f"{stamp}-{os.getpid()}-{time.monotonic_ns() % 10**6:06d}{suffix}"
    segments, maintenance = _begin_log(core, settings, directory, header)
    trouble = _Trouble(directory, maintenance)
    backlog = BacklogEventStore(
        segments,
        on_trouble=trouble.report,
        on_written_again=trouble.report_end,
        writes_alone=settings.max_log_wait_ms is not None,
        max_wait_ms=settings.max_log_wait_ms,
    )
    return OpenedLog(backlog, directory, remarks)


def _begin_log(
    core: Core, settings: LogSettings, directory: Path, header: dict[str, object]
) -> tuple[EventStore, Maintenance]:
    """Begin a log in `directory`.

    If the disk is full, delete old segments first. If that frees too little, begin the log as soon as there is room.
    """

    def begin(maintenance: Maintenance) -> SegmentEventStore:
        return SegmentEventStore.create(
            directory,
            header,
            durability=settings.durability,
            segment_bytes=settings.segment_bytes,
            sync_interval_ms=settings.sync_interval_ms,
            maintenance=maintenance,
        )

    maintenance = _maintenance(core, settings, settings.max_log_bytes)
    try:
        return begin(maintenance), maintenance
    except OSError as error:
        if not is_full(error):
            raise unwritable(directory, error) from error
    retired = _make_room(directory.parent, settings)
    limit = _limit_on_full_disk(directory.parent, settings)
    fitting = maintenance if limit == settings.max_log_bytes else _maintenance(core, settings, limit)
    try:
        store = begin(fitting)
    except OSError as error:
        if not is_full(error):
            raise unwritable(directory, error) from error
        messages.error(
            "the log cannot be created because its disk is full and deleting old logs freed too little: delete other "
            "files; until then requests are served without hits and new copies, and events wait in memory",
            log=str(directory),
            error=str(error),
            num_segments_deleted=len(retired),
        )
        return LateEventStore(lambda: begin(maintenance)), maintenance
    messages.warning(
        "the disk of log_dir was full: kvledger deleted the oldest segments to create this log, and limits logs to "
        "the space that is left; lower max_log_bytes, or delete other files and restart",
        log=str(directory),
        num_segments_deleted=len(retired),
        num_bytes_deleted=sum(each.num_bytes for each in retired),
        num_segments_not_verifiable=sum(not each.is_rest_verifiable for each in retired),
        max_log_bytes=limit,
    )
    return store, fitting


def _make_room(log_dir: Path, settings: LogSettings) -> list[Retirement]:
    """Delete the segments that exceed the limits of `log_dir`, then the oldest ones until the smallest log fits.

    Returns the deletions. They may free too little for even the smallest log.
    """
    retired: list[Retirement] = []
    on_trouble = _RetentionTrouble()
    max_age_seconds = None if settings.max_log_age_hours is None else settings.max_log_age_hours * 3600
    with contextlib.suppress(OSError, LogError):
        max_bytes = None if settings.max_log_bytes is None else settings.max_log_bytes - settings.segment_bytes
        retired += retire_logs(log_dir, max_bytes=max_bytes, max_age_seconds=max_age_seconds, on_trouble=on_trouble)
        size_of_disk = shutil.disk_usage(log_dir).total
        num_free_bytes = min(MIN_LOG_SEGMENTS * settings.segment_bytes, size_of_disk // 4)
        retired += make_room(log_dir, num_free_bytes, on_trouble=on_trouble)
    return retired


def _limit_on_full_disk(log_dir: Path, settings: LogSettings) -> int | None:
    """Return the size limit of all logs: `max_log_bytes`, or less if the logs would otherwise fill the disk again.

    For a short time, logs may exceed the limit by some segments. The limit leaves room on the disk for these.
    """
    with contextlib.suppress(OSError):
        fitting = num_log_bytes(log_dir) + free_bytes(log_dir) - (MAX_EXCESS_SEGMENTS + 1) * settings.segment_bytes
        fitting = max(fitting, MIN_LOG_SEGMENTS * settings.segment_bytes)
        return fitting if settings.max_log_bytes is None else min(settings.max_log_bytes, fitting)
    return settings.max_log_bytes


class _Cause(enum.Enum):
    """Why the log cannot be written; each cause has its own remedy."""

    FULL = enum.auto()
    SLOW = enum.auto()
    NOT_PERMITTED = enum.auto()
    OTHER = enum.auto()

    @classmethod
    def of(cls, error: OSError) -> _Cause:
        if isinstance(error, TimeoutError):
            return cls.SLOW
        if is_full(error):
            return cls.FULL
        return cls.NOT_PERMITTED if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS} else cls.OTHER


@attrs.define
class _Trouble:
    """Writes a message if the event log cannot be written.

    It writes a message at the first failure, then once a minute, and whenever the cause changes.
    """

    directory: Path
    maintenance: Maintenance
    _report_at: float = 0.0
    _reported: _Cause | None = None

    def report(self, error: OSError, num_events: int) -> None:
        if is_full(error):
            self.maintenance.disk_is_full()
        now, cause = time.monotonic(), _Cause.of(error)
        if now < self._report_at and cause is self._reported:
            return
        self._report_at, self._reported = now + _SECONDS_BETWEEN_MESSAGES, cause
        values = {"log": str(self.directory), "error": str(error), "num_events_waiting": num_events}
        if cause is _Cause.FULL:
            messages.error(
                "the log cannot be written because its disk is full: delete other files, or old logs with `kvledger "
                "retire`; until then requests are served without hits and new copies, and events wait in memory",
                **values,
            )
        elif cause is _Cause.SLOW:
            messages.warning(
                "the log is written late because its disk is slow: move log_dir to a faster disk if this repeats; "
                "until the log has caught up, requests are served without hits and new copies, and events wait in "
                "memory",
                **values,
            )
        elif cause is _Cause.NOT_PERMITTED:
            messages.error(
                "the log cannot be written because this process lacks the right to write to log_dir: give it this "
                "right; until then requests are served without hits and new copies, and events wait in memory",
                **values,
            )
        else:
            messages.error(
                "the log cannot be written because the disk reports an error: check the disk; until then requests are "
                "served without hits and new copies, and events wait in memory",
                **values,
            )

    def report_end(self, num_events: int, num_events_lost: int) -> None:
        self._report_at = 0.0
        messages.warning(
            "the log can be written again; `kvledger verify` names lost events, if there are any",
            log=str(self.directory),
            num_events_written=num_events,
            num_events_lost=num_events_lost,
        )


def _remarks_on_last(log_dir: Path) -> tuple[str, ...]:
    """Return remarks on the newest log in `log_dir` that no process is writing.

    Empty if that log is closed and complete.
    """
    logs: list[Path] = []
    with contextlib.suppress(OSError):
        logs = directories_in(log_dir)[::-1]
    for directory in logs:
        with contextlib.suppress(OSError, LogError):  # one that cannot be read is skipped
            if _WORKER in directory.name or not segment_paths(directory):
                continue
            ending = glance_at_ending(directory)
            if ending.missing is not None:
                messages.warning(
                    "the end of the previous log is missing; run `kvledger verify` on it to see what is lost",
                    log=str(directory),
                    detail=ending.missing.detail,
                )
                return (f"{LOG_BEFORE}{directory.name}, lacks its end: {ending.missing.detail}",)
            if ending.how is HowEnded.CUT_OFF:
                return (f"{LOG_BEFORE}{directory.name}, was cut off: its process ended without closing it",)
            if ending.how is not HowEnded.OPEN:
                break
    return ()


def _maintenance(core: Core, settings: LogSettings, max_log_bytes: int | None) -> Maintenance:
    max_age_seconds = None if settings.max_log_age_hours is None else settings.max_log_age_hours * 3600
    return Maintenance(max_log_bytes, max_age_seconds, snapshots=SnapshotProcess(core), on_trouble=_RetentionTrouble())


@attrs.define
class _RetentionTrouble:
    """Writes a message if closed segments cannot be compressed or deleted.

    It does not repeat a message about a file that kvledger refuses to open.
    """

    _reported: set[str] = attrs.field(factory=set, init=False)

    def __call__(self, error: OSError | LogError) -> None:
        """See `Trouble`."""
        if not isinstance(error, RefusedFile):
            messages.error(
                "closed segments could not be compressed or retired, so logs may exceed max_log_bytes and "
                "max_log_age_hours; if this process lacks permission, run `kvledger retire` as a user that has it",
                error=str(error),
            )
        elif str(error) not in self._reported:
            self._reported.add(str(error))
            messages.warning(
                "log_dir holds something that kvledger does not open and does not delete: remove it",
                error=str(error),
            )
