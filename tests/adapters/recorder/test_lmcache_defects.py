"""Defects of vLLM 0.32's LMCacheMPConnector, unmodified, on vLLM's scheduler: the recorder's log names them.

Each answered lookup adds to what the connector takes for stored (LMCache issue 4508), a preempted request is
answered that there is nothing, and neither of vLLM's policies survives a load that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sim.connectors import Recorded
from sim.lmcache_mp import LMCacheMP
from sim.recorded import audited, said_in
from vllm.v1.request import RequestStatus

from kvledger.adapters.recorded.payloads import LookupReturned, Transferred
from kvledger.adapters.recorder import KVLedgerRecorder

pytestmark = pytest.mark.scheduler

Record = Callable[..., tuple[Any, Any]]
LMCACHE = Recorded(inner=LMCacheMP(chunk_size=16), name="KVLedgerRecorder")


def started(record: Record) -> tuple[Any, Any]:
    """An engine whose server has 48 tokens of the request that comes next, and has been seen to keep far more."""
    engine, recording = record(setup=LMCACHE, num_blocks=20, enable_prefix_caching=False)
    for request_id, first, num_tokens in (
        ("old", 5000, 32),
        *((f"large-{number}", 300 * number, 250) for number in range(1, 6)),
        ("old again", 5000, 40),
        ("before", 0, 48),
    ):
        engine.add(request_id, range(first, first + num_tokens), 2)
        engine.run()
    return engine, recording


@pytest.mark.parametrize("num_answers", [2, 3])
def test_a_lookup_that_is_repeated_leaves_a_hole_in_what_is_stored(record: Record, num_answers: int) -> None:
    """It waits for another one's blocks. Named with the hole, and that asking made it; nothing else is named."""
    engine, recording = started(record)
    engine.add("other", range(2000, 2270), 6)
    for _ in range(8 - num_answers):
        engine.step()
    engine.add("waits", range(200), 2)
    engine.run()
    (violation,) = audited(recording).violations
    assert (violation.rule, violation.request_id) == ("STORE_CONTIGUOUS", "waits")
    assert f"saves from block {3 * num_answers} of the request on, but no copy has saved block 3" in violation.detail
    assert f"the hits of {num_answers} answers add up to its start" in violation.detail


def test_a_lookup_that_is_made_once_leaves_none(record: Record) -> None:
    """The same request, which waits for nobody."""
    engine, recording = started(record)
    engine.add("waits", range(200), 2)
    engine.run()
    assert audited(recording).violations == []


def crowd(engine: Any, num_outputs: int) -> None:
    """Two requests decode; with enough outputs there are not blocks for both."""
    engine.add("first", range(1000, 1140), num_outputs)
    engine.add("second", range(100), num_outputs)
    engine.run()


def test_a_preempted_request_is_given_nothing_of_what_is_there(record: Record) -> None:
    """Named with the tokens that the connector had; nothing else is named."""
    engine, recording = started(record)
    crowd(engine, 100)
    assert engine.num_preemptions > 0
    (violation,) = audited(recording).violations
    assert (violation.rule, violation.request_id) == ("RESUME_COVERS_OUTPUT", "second")
    assert (
        "the connector offers nothing after the preemption, though it had 48 tokens of the request" in violation.detail
    )
    offers = {told.num_external_tokens for told in said_in(recording, LookupReturned) if told.num_tokens > 140}
    assert offers == {0}


def test_without_a_preemption_nothing_is_named(record: Record) -> None:
    """The same requests, which end before the blocks do."""
    engine, recording = started(record)
    crowd(engine, 10)
    assert engine.num_preemptions == 0
    assert audited(recording).violations == []


def with_a_failed_load(record: Record, policy: str) -> tuple[Any, Any]:
    """A prompt is stored; who comes with it again is to load it, and the server fails."""
    setup = Recorded(inner=LMCacheMP(chunk_size=16, failure_share=1.0), name="KVLedgerRecorder")
    engine, recording = record(
        setup=setup,
        num_blocks=20,
        enable_prefix_caching=False,
        kv_transfer={"kv_load_failure_policy": policy},
    )
    engine.add("before", range(64), 2)
    engine.run()
    engine.add("loads", range(80), 2)
    return engine, recording


def test_a_request_whose_load_failed_waits_for_ever(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "recompute": it is offered the same again, and what vLLM takes up of it is handed to no worker."""
    now_ns = 0

    def clock() -> int:
        nonlocal now_ns
        now_ns += 1_000_000_000
        return now_ns

    monkeypatch.setattr(KVLedgerRecorder, "clock", staticmethod(clock))
    engine, recording = with_a_failed_load(record, "recompute")
    for _ in range(100):
        engine.step()
    assert engine.scheduler.requests["loads"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert [told.num_external_tokens for told in said_in(recording, LookupReturned)] == [0, 64, 64]
    assert [copy.is_load for copy in said_in(recording, Transferred)].count(True) == 1
    (violation,) = audited(recording).violations
    assert (violation.rule, violation.request_id) == ("LIVENESS", "loads")


def test_a_load_that_fails_ends_the_engine(record: Record) -> None:
    """With "fail": the connector keeps the blocks of the request, which vLLM frees when it hears of the load."""
    engine, recording = with_a_failed_load(record, "fail")
    with pytest.raises(AssertionError):
        engine.run()
    assert engine.finish_reasons["loads"] == "error"
    (violation,) = audited(recording).violations
    assert (violation.rule, violation.request_id) == ("COMPLETION_ONCE", "loads")
