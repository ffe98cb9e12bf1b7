"""Digests of what a wrapped connector copies: in the recorder's log, and judged there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sim.recorded import audited, events_of
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from kvledger.adapters.recorder.page_digests import DigestedCopy, RecordedReports
from kvledger.adapters.simulation.hashed_model import CorruptKV
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

Record = Callable[..., tuple[Any, Any]]


def serve(engine: Any) -> None:
    """A prompt is saved; when vLLM's own cache is empty, it is loaded."""
    prompt = list(range(100))
    engine.add("first", prompt, 3)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    engine.add("second", prompt, 3)
    engine.run()


def digested(recording: Any) -> list[e.PagesDigested]:
    """What the log has."""
    return [event for _, event in events_of(recording) if isinstance(event, e.PagesDigested)]


def test_what_is_loaded_is_what_was_saved(record: Record) -> None:
    """OffloadingConnector, all blocks."""
    engine, recording = record(digests="all")
    serve(engine)
    found = digested(recording)
    saved = {
        event.first_block + place: digest
        for event in found
        if not event.is_load and event.request_id == "first"
        for place, digest in enumerate(event.digests)
    }
    (load,) = [event for event in found if event.is_load]
    assert load.request_id == "second"
    assert list(load.digests) == [saved[block] for block in range(load.first_block, len(load.digests))]
    assert len(load.digests) == 6
    assert audited(recording).is_sound


def test_a_byte_that_changes_in_the_connectors_memory_is_named(record: Record) -> None:
    """With the block, before the model reads it."""
    engine, recording = record(digests="all")
    prompt = list(range(100))
    engine.add("first", prompt, 3)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    copies = engine.worker.wrapped.connector_worker.worker
    for page in copies._host:
        page[:, 0] ^= 1
    engine.add("second", prompt, 3)
    with pytest.raises(CorruptKV):
        engine.run()
    (violation,) = audited(recording).violations
    assert violation.rule == "BYTES_UNCHANGED"
    assert "block 0 of the table" in violation.detail


def test_a_share_digests_the_same_places_of_all(record: Record) -> None:
    """So that a load has its save in the log."""
    engine, recording = record(digests=0.5)
    serve(engine)
    places = {
        is_load: {
            event.first_block + place
            for event in digested(recording)
            if event.is_load is is_load
            for place, _ in enumerate(event.digests)
        }
        for is_load in (False, True)
    }
    assert 0 < len(places[True]) < 6
    assert places[True] <= places[False]
    assert audited(recording).is_sound


def test_without_the_key_nothing_is_digested_or_put_into_an_envelope(record: Record) -> None:
    """The default."""
    engine, recording = record()
    serve(engine)
    assert engine.worker.pages is None
    assert digested(recording) == []


class _Told(KVConnectorWorkerMetadata):
    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def aggregate(self, other: Any) -> _Told:
        return _Told(*self.ranks, *other.ranks)


def test_envelopes_of_several_ranks_are_put_together_as_the_connector_does() -> None:
    """What it said itself, and all digests."""
    copies = [DigestedCopy("a", "1", rank, False, 0, 0, (rank,)) for rank in (0, 1, 2)]
    first, second, third = (
        RecordedReports(told, (copy,)) for told, copy in zip((_Told(0), None, _Told(2)), copies, strict=True)
    )
    whole = first.aggregate(second).aggregate(third)
    assert whole.wrapped.ranks == (0, 2)  # type: ignore[union-attr]
    assert whole.digested == tuple(copies)
