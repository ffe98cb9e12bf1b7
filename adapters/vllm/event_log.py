"""Opens the log of one engine start: where it goes, what its header says, and what happens when writing fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import attrs

from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.adapters.vllm.messages import messages
from kvledger.adapters.vllm.snapshots import LogSnapshots
from kvledger.lifecycle import ConfigurationError, HandlerRegistry, LedgerConfiguration
from kvledger.lifecycle.codec import vocabulary_header
from kvledger.lifecycle.machine import table_fingerprint
from kvledger.storage.events import (
    BacklogEventStore,
    Durability,
    EventStore,
    LogError,
    MemoryEventStore,
    Retention,
    SegmentEventStore,
)


@attrs.frozen
class OpenedLog:
    """A store, its directory where it has one, and who writes snapshots there."""

    store: EventStore
    directory: Path | None
    snapshots: LogSnapshots | None = None


def open_event_log(
    settings: ConnectorSettings,
    configuration: LedgerConfiguration,
    handlers: HandlerRegistry,
    *,
    on_trouble: Callable[[OSError, int], None],
) -> OpenedLog:
    """Create the log of this engine start, and begin to keep `log_dir` to its limits.

    Raises:
        ConfigurationError: `log_dir` cannot be written, at start, when a person can still correct it.
    """
    header = {
        **vocabulary_header(),
        "kvledger_version": metadata.version("kvledger"),
        "vllm_version": versions.vllm_version(),
        "table_fingerprint": table_fingerprint(),
        "handler_fingerprint": handlers.fingerprint(),
        "configuration": attrs.asdict(configuration),
        "opened_at_unix_ns": time.time_ns(),
        "process_id": os.getpid(),
    }
    if settings.log_dir is None or settings.durability is Durability.MEMORY:
        return OpenedLog(MemoryEventStore(header, max_bytes=settings.memory_log_bytes), None)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    directory = settings.log_dir.absolute() / f"{stamp}-{os.getpid()}-{time.monotonic_ns() % 10**6:06d}"
    try:
        segments = SegmentEventStore.create(
            directory,
            header,
            durability=settings.durability,
            segment_bytes=settings.segment_bytes,
            sync_interval_ms=settings.sync_interval_ms,
            retention=_retention(settings),
        )
    except OSError as error:
        message = f"log_dir: cannot write to {directory} ({error}); name a writable directory, or null for no files"
        raise ConfigurationError(message) from error
    backlog = BacklogEventStore(segments, on_trouble=on_trouble)
    return OpenedLog(backlog, directory, LogSnapshots(segments, handlers))


def _retention(settings: ConnectorSettings) -> Retention | None:
    if settings.max_log_bytes is None and settings.max_log_age_hours is None:
        return None
    max_age_seconds = None if settings.max_log_age_hours is None else settings.max_log_age_hours * 3600
    return Retention(settings.max_log_bytes, max_age_seconds, all_logs=True, on_trouble=_could_not_retire)


def _could_not_retire(error: OSError | LogError) -> None:
    messages.error("old logs could not be retired; serving goes on", error=str(error))
