"""Opens the log of one engine start: where it goes, what its header says, and what happens when writing fails."""

from __future__ import annotations

import contextlib
import os
import re
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
    BacklogEventStore,
    EventStore,
    HowEnded,
    LogError,
    Maintenance,
    MemoryEventStore,
    SegmentEventStore,
    glance_at_ending,
)
from kvledger.storage.events.segment_file import segment_paths

_SECONDS_BETWEEN_MESSAGES: Final = 60.0


_WORKER: Final = "-worker-"


@attrs.frozen
class WorkerOfLog:
    """Who writes a log that is not the scheduler's."""

    engine_id: str
    """Of vLLM; equal in the logs of one engine."""
    rank: int

    @property
    def suffix(self) -> str:
        """Ends the name of the log's directory."""
        return f"{_WORKER}{self.rank}-of-{re.sub('[^A-Za-z0-9]', '', self.engine_id)[:12]}"


@attrs.frozen
class OpenedLog:
    """A store, and its directory where it has one."""

    store: EventStore
    directory: Path | None
    remarks: tuple[str, ...] = ()
    """What this log should say of the one before it."""

    def close(self) -> None:
        """Close the store, and log how much it could not write."""
        self.store.close()
        if isinstance(self.store, BacklogEventStore) and self.store.num_events_lost:
            messages.error(
                "the log lacks events that could not be written; `kvledger verify` names them",
                log=str(self.directory),
                num_events_lost=self.store.num_events_lost,
            )

    @property
    def is_behind(self) -> bool:
        """Whether events that were handed over are not in the log yet."""
        return isinstance(self.store, BacklogEventStore) and self.store.is_behind


def open_event_log(
    core: Core,
    settings: LogSettings,
    configuration: LedgerConfiguration,
    *,
    worker: WorkerOfLog | None = None,
    **of_writer: object,
) -> OpenedLog:
    """Create the log of this engine start, and begin to keep `log_dir` to its limits.

    Args:
        core: what is written with it.
        settings: where it goes, and how safely.
        configuration: of the ledger.
        worker: of a log that a worker writes, besides the scheduler's.
        of_writer: more entries of the header.

    Raises:
        ConfigurationError: `log_dir` cannot be written, at start, when a person can still correct it.
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
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    remarks = () if worker else _remarks_on_last(settings.log_dir.absolute())
    suffix = worker.suffix if worker else ""
    directory = settings.log_dir.absolute() / f"{stamp}-{os.getpid()}-{time.monotonic_ns() % 10**6:06d}{suffix}"
    try:
        segments = SegmentEventStore.create(
            directory,
            header,
            durability=settings.durability,
            segment_bytes=settings.segment_bytes,
            sync_interval_ms=settings.sync_interval_ms,
            maintenance=_maintenance(core, settings),
        )
    except OSError as error:
        raise unwritable(directory, error) from error
    trouble = _Trouble(directory)
    backlog = BacklogEventStore(
        segments,
        on_trouble=trouble.report,
        on_written_again=trouble.report_end,
        writes_alone=settings.max_log_wait_ms is not None,
        max_wait_ms=settings.max_log_wait_ms,
    )
    return OpenedLog(backlog, directory, remarks)


@attrs.define
class _Trouble:
    """Reports that the log cannot be written: at first, then once a minute, and when it is written again."""

    directory: Path
    _report_at: float = 0.0

    def report(self, error: OSError, num_events: int) -> None:
        """An attempt failed."""
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + _SECONDS_BETWEEN_MESSAGES
            messages.error(
                "the log cannot be written: free the disk, or give back the right to write; serving goes on without "
                "hits and new copies, events wait in memory and are tried again",
                log=str(self.directory),
                error=str(error),
                num_events_waiting=num_events,
            )

    def report_end(self, num_events: int, num_events_lost: int) -> None:
        """Everything that waited is written."""
        self._report_at = 0.0
        messages.warning(
            "the log is written again; `kvledger verify` names what is lost, where anything is",
            log=str(self.directory),
            num_events_written=num_events,
            num_events_lost=num_events_lost,
        )


def _remarks_on_last(log_dir: Path) -> tuple[str, ...]:
    """What to say of the newest log in `log_dir` that nobody writes: nothing where it was closed and is whole."""
    logs: list[Path] = []
    with contextlib.suppress(OSError):
        logs = sorted(log_dir.iterdir(), reverse=True)
    for directory in logs:
        with contextlib.suppress(OSError, LogError):  # of one that cannot be read nothing is known
            if _WORKER in directory.name or not directory.is_dir() or not segment_paths(directory):
                continue
            ending = glance_at_ending(directory)
            if ending.missing is not None:
                messages.warning(
                    "the end of the log that was written before is missing; `kvledger verify` says more",
                    log=str(directory),
                    detail=ending.missing.detail,
                )
                return (f"{LOG_BEFORE}{directory.name}, lacks its end: {ending.missing.detail}",)
            if ending.how is HowEnded.CUT_OFF:
                return (f"{LOG_BEFORE}{directory.name}, was cut off: its process ended without closing it",)
            if ending.how is not HowEnded.OPEN:
                break
    return ()


def _maintenance(core: Core, settings: LogSettings) -> Maintenance:
    max_age_seconds = None if settings.max_log_age_hours is None else settings.max_log_age_hours * 3600
    return Maintenance(
        settings.max_log_bytes, max_age_seconds, snapshots=SnapshotProcess(core), on_trouble=_could_not_retire
    )


def _could_not_retire(error: OSError | LogError) -> None:
    messages.error(
        "old logs could not be retired and take more room than max_log_bytes and max_log_age_hours allow; `kvledger "
        "retire` does it where this process may not",
        error=str(error),
    )
