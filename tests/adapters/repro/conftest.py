"""Recorded worlds, logs on disk, and logs compared up to the names in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import attrs
import msgspec
import pytest

from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import EventEncoder, vocabulary_header
from kvledger.lifecycle.replay import SequencedEvent
from kvledger.storage.events import SegmentEventStore


def write_log(directory: Path, events: Iterable[e.Event], configuration: LedgerConfiguration) -> Path:
    """Write a log, one frame per observation with its decisions."""
    header = {
        **vocabulary_header(Core.standard()),
        "configuration": attrs.asdict(configuration),
        "kvledger_version": "0.1.0",
        "vllm_version": "0.32.0",
        "opened_at_unix_ns": 1_750_000_000_000_000_000,
    }
    store = SegmentEventStore.create(directory, header)
    encoder = EventEncoder()
    frame: list[e.Event] = []
    for event in events:
        if frame and not event.is_decision:
            store.append(encoder.encode(frame), len(frame))
            frame = []
        frame.append(event)
    store.append(encoder.encode(frame), len(frame))
    store.close()
    return directory


def without_names(events: Sequence[SequencedEvent]) -> list[SequencedEvent]:
    """The events with chunk keys numbered in the order in which they appear, and without times."""
    names: dict[bytes, bytes] = {}

    def named(key: bytes) -> bytes:
        return names.setdefault(key, str(len(names)).encode())

    found = []
    for sequence, event in events:
        changes: dict[str, object] = {name: 0 for name in ("time_ns", "duration_ns") if hasattr(event, name)}
        if isinstance(event, e.ChunkKeysObserved):
            changes["keys"] = tuple(named(key) for key in event.keys)
        elif isinstance(event, e.ChunkEvicted | e.ChunkTainted):
            changes["key"] = named(event.key)
        found.append((sequence, msgspec.structs.replace(event, **changes)))
    return found


@attrs.frozen
class Tools:
    """What tests call by name: a test folder is no package, so nothing can be imported from here."""

    write_log: Callable[..., Path] = write_log
    without_names: Callable[..., list[SequencedEvent]] = without_names


@pytest.fixture(scope="session")
def tools() -> Tools:
    """Functions that make and compare logs."""
    return Tools()
