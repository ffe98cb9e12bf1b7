"""Copies are read from what vLLM's own connectors, unmodified on vLLM's scheduler, hand to their workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sim.connectors import Example, NamedConnector, Recorded, Several
from sim.recorded import audited, events_of, said_in
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata

from kvledger.adapters.lab.simulation.connectors import ConnectorSetup, Offloading, SimpleCPU
from kvledger.adapters.recorded.extension import Recorder
from kvledger.adapters.recorded.payloads import (
    EndReturned,
    Transferred,
    TransferredFor,
    TransfersAwaited,
    TransfersEnded,
    Undecoded,
)
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

Record = Callable[..., tuple[Any, Any]]


def copies(recording: Any) -> list[tuple[str, Transferred]]:
    """(request id, copy), also of those that are over."""
    found = []
    for _, event in events_of(recording):
        if isinstance(event, e.ExtensionObserved | e.ExtensionNoted):
            told = Recorder.payload_of(event)
            if isinstance(told, Transferred):
                found.append((event.request_id, told))
            elif isinstance(told, TransferredFor):
                found.append((told.request_id, told.copy))
    return found


def tables(recording: Any) -> dict[str, tuple[int, ...]]:
    """Request id -> the blocks that it was given at first."""
    found: dict[str, tuple[int, ...]] = {}
    for _, event in events_of(recording):
        if isinstance(event, e.BlocksAllocated):
            found.setdefault(event.request_id, event.block_ids)
    return found


def serve_twice(engine: Any, num_tokens: int = 64) -> None:
    """Two at once, then somebody else who needs nearly all blocks, then one of the two again."""
    for request_id, first in (("a", 0), ("b", 500)):
        engine.add(request_id, range(first, first + num_tokens), 3)
    engine.run()
    engine.add("all", range(900, 900 + 240), 3)
    engine.run()
    engine.add("again", range(num_tokens), 3)
    engine.run()


@pytest.mark.parametrize("num_questions", [0, 2])
def test_simple_cpu_offload_names_no_request_and_the_blocks_say_whose_they_are(
    record: Record, num_questions: int
) -> None:
    """A store of two requests is told as two copies; its end, and whom a load is for, is in what it does name."""
    engine, recording = record(SimpleCPU(num_questions=num_questions), num_blocks=17)
    serve_twice(engine)
    told, table = copies(recording), tables(recording)
    stored = {request_id: copy.block_ids for request_id, copy in reversed(told) if not copy.is_load}
    assert stored["a"] == table["a"]
    assert stored["b"] == table["b"]
    assert {copy.job for request_id, copy in told if request_id in {"a", "b"} and not copy.is_load} == {"store 0"}
    (load,) = [(request_id, copy) for request_id, copy in told if copy.is_load]
    assert load[0] == "again"
    assert load[1].block_ids == table["again"][: len(load[1].block_ids)]
    ended = [job for said in said_in(recording, TransfersEnded) for job in said.jobs]
    assert ended == list(dict.fromkeys(copy.job for _, copy in told if not copy.is_load))
    assert audited(recording).is_sound


def test_a_lazy_store_is_of_those_who_had_the_blocks_last(record: Record) -> None:
    """It stores what is free: of requests that are over."""
    engine, recording = record(SimpleCPU(is_lazy=True), num_blocks=17)
    serve_twice(engine)
    stored = [(request_id, copy) for request_id, copy in copies(recording) if not copy.is_load]
    assert {request_id for request_id, _ in stored} >= {"a", "b"}
    assert {request_id for request_id, copy in said_ids(recording)} >= {"a", "b"}
    assert audited(recording).is_sound


def said_ids(recording: Any) -> list[tuple[str, Transferred]]:
    """Of copies for nobody who still has the blocks."""
    return [(said.request_id, said.copy) for said in said_in(recording, TransferredFor)]


def test_a_block_that_nobody_was_given_is_of_nobody(record: Record) -> None:
    """The connector may move what it likes; the log does not guess."""
    _, recording = record(SimpleCPU())
    recording.built(SimpleCPUOffloadMetadata(store_event=0, store_gpu_blocks=[41, 42], store_cpu_blocks=[0, 1]), 0)
    assert [(request_id, copy.block_ids) for request_id, copy in copies(recording)] == [("", (41, 42))]


def test_example_connector_takes_whole_prompts_from_the_first_block_on(record: Record) -> None:
    """Told by slots alone; the request is whoever has the blocks."""
    engine, recording = record(
        setup=Recorded(inner=Example(), name="KVLedgerRecorder"), num_blocks=17, enable_prefix_caching=False
    )
    serve_twice(engine, num_tokens=66)
    told, table = copies(recording), tables(recording)
    assert [(request_id, copy.is_load) for request_id, copy in told] == [
        *((request_id, False) for request_id in ("a", "b", "all")),
        ("again", True),
    ]
    for request_id, copy in told:
        assert copy.block_ids == table[request_id][: len(copy.block_ids)]
        assert copy.block_ids
    assert audited(recording).is_sound


def nixl(name: str) -> ConnectorSetup:
    """The scheduler's side of it."""
    return NamedConnector(name=name, module="sim.nixl")


REMOTE = {
    "remote_engine_id": "elsewhere",
    "remote_request_id": "theirs",
    "remote_host": "localhost",
    "remote_port": 1,
    "tp_size": 1,
}


@pytest.mark.parametrize("name", ["PullWithoutWorker", "PushWithoutWorker"])
def test_nixl_says_where_it_receives(record: Record, name: str) -> None:
    """Into the blocks behind those that are cached here, until vLLM hears of the request."""
    engine, recording = record(nixl(name))
    engine.add("before", range(40), 1)
    engine.run()
    request = engine.add("a", range(64), 3)
    request.kv_transfer_params = {"do_remote_prefill": True, "remote_block_ids": ([3, 4, 5, 6],), **REMOTE}
    engine.scheduler.schedule()
    (told,) = copies(recording)
    (request_id, copy), table = told, tables(recording)["a"]
    assert (request_id, copy.is_load, copy.group, copy.ends_with) == ("a", True, 0, "request")
    assert copy.block_ids == table[2:]
    assert copy.first_block == (2 if name.startswith("Pull") else -1)
    assert audited(recording).is_sound


def test_nixl_pushes_what_an_ended_request_keeps(record: Record) -> None:
    """Its blocks stay until vLLM hears that they were sent."""
    engine, recording = record(nixl("PushWithoutWorker"))
    request = engine.add("a", range(64), 1)
    request.kv_transfer_params = {"do_remote_decode": True}
    for _ in range(3):
        engine.step()
    assert [said.keeps_blocks for said in said_in(recording, EndReturned)] == [True]
    ((request_id, copy),) = copies(recording)
    assert (request_id, copy.is_load, copy.block_ids) == ("a", False, tables(recording)["a"])
    assert audited(recording).is_sound


def test_offloading_says_what_is_waited_for_and_what_is_done(record: Record) -> None:
    """Jobs by their numbers, also those of a child of MultiConnector."""
    for inner, prefix in ((Offloading(), ""), (Several(children=(Offloading(),)), "0/")):
        engine, recording = record(inner, num_blocks=12, max_model_len=160)
        for request_id, first in (("a", 0), ("b", 500), ("c", 900)):
            engine.add(request_id, range(first, first + 64), 40)
        engine.run()
        jobs = {copy.job for _, copy in copies(recording)}
        ended = [job for said in said_in(recording, TransfersEnded) for job in said.jobs]
        awaited = {job for said in said_in(recording, TransfersAwaited) for job in said.jobs}
        assert len(ended) == len(set(ended))
        assert set(ended) == jobs
        assert awaited
        assert awaited <= jobs
        assert all(job.startswith(prefix) for job in jobs)


def test_a_report_that_is_not_understood_is_said_once(record: Record) -> None:
    """From then on copies are not recorded, and everything else is."""
    engine, recording = record(SimpleCPU())
    unknown: Any = type("OffloadingWorkerMetadata", (), {})

    def pass_on(output: Any) -> None:
        output.kv_connector_worker_meta = output.kv_connector_worker_meta or unknown()

    engine.on_output = pass_on
    serve_twice(engine)
    assert said_in(recording, Undecoded) == [Undecoded("OffloadingWorkerMetadata", "AttributeError")]
    assert copies(recording) == []
    assert audited(recording).is_sound
