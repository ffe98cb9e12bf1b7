"""Digests of what a wrapped connector copies: in the recorder's log, and judged there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from sim.connectors import Example, NamedConnector, Recorded
from sim.lmcache_mp import SERVERS, LMCacheMP
from sim.recorded import audited, events_of
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from kvledger.adapters.lab.simulation.connectors import ConnectorSetup, Offloading, SimpleCPU
from kvledger.adapters.lab.simulation.hashed_model import HashedModel
from kvledger.adapters.recorder.page_digests import CopiedPages, FoundDigests, RecordedReports
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


def spoil_rows(tensors: Iterable[torch.Tensor], block: int) -> None:
    """One byte of a block, where blocks are rows in the order of their table; rows that are zero hold nothing."""
    for tensor in tensors:
        stored = tensor.flatten(1).any(dim=1).nonzero().flatten()
        tensor[stored[block]].view(torch.uint8).flatten()[0] ^= 1


def spoil_chunk(connector: Any, block: int) -> None:
    """One byte of a block in the chunk of two that LMCache's server has."""
    server = SERVERS[connector.worker_adapter._url]
    chunk = next(pages for (_, key), pages in server.chunks.items() if len(key) == (block // 2 + 1) * 32)
    for page in chunk:
        page[block % 2].view(torch.uint8).flatten()[0] ^= 1


def spoil_files(connector: Any, block: int) -> None:
    """One byte of a block in each layer's file of a prompt."""
    for file in Path(connector._storage_path).rglob("*.safetensors"):
        tensors = load_file(file)
        tensors["kv_cache"][16 * block].view(torch.uint8).flatten()[0] ^= 1
        save_file(tensors, file)


@attrs.frozen
class Case:
    """A connector, and how bytes of what it holds are changed behind its back."""

    inner: ConnectorSetup
    spoil: Callable[[Any, int], None]
    recorder: str = "KVLedgerRecorderHMA"
    options: Mapping[str, Any] = {}


CASES = {
    "OffloadingConnector": Case(
        Offloading(), lambda connector, block: spoil_rows(connector.connector_worker.worker._host, block)
    ),
    "SimpleCPUOffloadConnector": Case(
        SimpleCPU(num_questions=1),
        lambda connector, block: spoil_rows(connector.worker_handler.cpu_kv_caches.values(), block),
    ),
    "ExampleConnector": Case(Example(), spoil_files, "KVLedgerRecorder", {"enable_prefix_caching": False}),
    "LMCacheMPConnector": Case(LMCacheMP(), spoil_chunk, "KVLedgerRecorder"),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_that_change_in_what_the_connector_holds_are_named(
    record: Record, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With the request that loads them and the block; real models do not look at what they read."""
    case = CASES[name]
    monkeypatch.setattr(HashedModel, "_check", lambda *_: None)
    engine, recording = record(
        setup=Recorded(inner=case.inner, name=case.recorder), digests="all", num_blocks=24, **case.options
    )
    prompt = list(range(100))
    engine.add("first", prompt, 3)
    engine.run()
    engine.add("other", range(500, 500 + 360), 3)
    engine.run()
    case.spoil(engine.worker.wrapped, 2)
    engine.add("second", prompt, 3)
    engine.run()
    (load,) = [event for event in digested(recording) if event.is_load]
    assert (load.request_id, load.first_block, len(load.digests)) == ("second", 0, 6)
    (violation,) = audited(recording).violations
    assert violation.rule == "BYTES_UNCHANGED"
    assert violation.request_id == "second"
    assert violation.detail.startswith("block 2 of the table, group 0, rank 0: was saved as")


def test_what_is_saved_after_its_request_has_ended_is_compared_as_well(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `lazy_offload` blocks are saved when nobody uses them any more."""
    monkeypatch.setattr(HashedModel, "_check", lambda *_: None)
    engine, recording = record(SimpleCPU(is_lazy=True), digests="all", num_blocks=24)
    engine.add("first", range(100), 3)
    engine.run()
    engine.add("other", range(500, 500 + 250), 60)
    engine.run()
    (save,) = [event for event in digested(recording) if event.request_id == "first"]
    assert (save.is_load, save.first_block, len(save.digests)) == (False, 0, 6)
    for tensor in engine.worker.wrapped.worker_handler.cpu_kv_caches.values():
        tensor[:, 0] ^= 1
    engine.add("second", range(100), 3)
    engine.run()
    (violation,) = audited(recording).violations
    assert (violation.rule, violation.request_id) == ("BYTES_UNCHANGED", "second")
    assert "block 3 of the table" in violation.detail  # those before it are still in vLLM's own cache


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
    assert engine.worker.digests is None
    assert digested(recording) == []


@pytest.mark.parametrize("name", ["PullWithoutWorker", "PushWithoutWorker"])
def test_what_nixl_receives_is_digested_when_its_worker_reports_it(record: Record, name: str) -> None:
    """The full blocks behind those that are cached here; its worker needs a peer, and reports in this test alone."""
    engine, recording = record(NamedConnector(name=name, module="sim.nixl"), digests="all")
    engine.add("before", range(40), 1)
    engine.run()
    request = engine.add("a", range(64), 3)
    request.kv_transfer_params = {
        "do_remote_prefill": True,
        "remote_block_ids": ([3, 4, 5, 6],),
        "remote_engine_id": "elsewhere",
        "remote_request_id": "theirs",
        "remote_host": "localhost",
        "remote_port": 1,
        "tp_size": 1,
    }
    metadata = engine.scheduler.schedule().kv_connector_metadata
    (pages,) = metadata.pages
    table = next(
        event.block_ids
        for _, event in events_of(recording)
        if isinstance(event, e.BlocksAllocated) and event.request_id == "a"
    )
    assert (pages.life[0], pages.is_load, pages.block_ids) == ("a", True, table[2:4])
    worker = engine.worker.digests
    worker.step_begins(metadata)
    worker.step_has_computed()
    assert worker.taken() == ()
    worker.received({"a"}, ())
    (found,) = worker.taken()
    assert (found.pages, len(found.digests)) == (pages, 2)


class _Told(KVConnectorWorkerMetadata):
    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def aggregate(self, other: Any) -> _Told:
        return _Told(*self.ranks, *other.ranks)


def test_envelopes_of_several_ranks_are_put_together_as_the_connector_does() -> None:
    """What it said itself, and all digests."""
    pages = CopiedPages(("a", 0, 0), "a", "1", is_load=False, ends_with="job", group=0, first_block=0, block_ids=(7,))
    copies = [FoundDigests(pages, rank, (rank,)) for rank in (0, 1, 2)]
    first, second, third = (
        RecordedReports(told, (copy,)) for told, copy in zip((_Told(0), None, _Told(2)), copies, strict=True)
    )
    whole = first.aggregate(second).aggregate(third)
    assert whole.wrapped.ranks == (0, 2)  # type: ignore[union-attr]
    assert whole.digested == tuple(copies)
