"""Recorded worlds, logs on disk, and logs compared up to the names in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import attrs
import msgspec
import pytest

from kvledger.adapters.repro.write import log_bytes
from kvledger.lifecycle import Core, LedgerConfiguration, SequencedEvent
from kvledger.lifecycle import events as e


def write_log(path: Path, events: Iterable[e.Event], configuration: LedgerConfiguration) -> Path:
    """Write a log of one segment."""
    path.write_bytes(log_bytes(Core.standard(), configuration, {"vllm_version": "0.32.0"}, enumerate(events, 1)))
    return path


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
