"""Incidents of preemption and return.

Elsewhere:
- vllm#50297, #48141 (a preempted request ends by the output in flight): `test_hook_contract.py`.
- LMCache#4612, #4955, #5248 (what a key holds after a preemption): `test_source_blocks.py`.
- LMCache#3145: `test_store_progress.py`; ascend#16729: `test_completions.py`.

Not met here: vllm#53250 in its own form (a transfer between engines that can be asked for once only).
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvledger.adapters.vllm.metrics import COUNTERS
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


def test_vllm_53250_what_was_loaded_once_can_be_loaded_again(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: hang: after the load was done the request was preempted, and its KV could be had only once."""
    engine = make_engine(num_blocks=30, chunk_size=16, enable_prefix_caching=False, **runner, **transfers)
    # As for a producer: for a consumer vLLM keeps the blocks of steps in flight, and refuses to reset meanwhile.
    engine.scheduler.defer_block_free = False
    engine.serve("writer", range(64), 2)
    engine.add("reader", range(70), 30)
    for _ in range(3):
        for _ in range(5):
            engine.step()
        while engine.scheduler.requests["reader"].status is not RequestStatus.RUNNING:
            engine.step()  # while an asynchronous load is under way, vLLM refuses to reset
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    loads = engine.logged(e.LoadIssued, request_id="reader")
    assert [load.generation for load in loads] == [0, 1, 2, 3]
    assert all(load.num_tokens >= 64 for load in loads)


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_lmcache_4612_a_preempted_request_is_loaded(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], enable_prefix_caching: bool
) -> None:
    """Symptom: a preempted request was never looked up, so everything was computed again (`return 0, False`)."""
    engine = make_engine(
        num_blocks=14, chunk_size=16, enable_prefix_caching=enable_prefix_caching, **runner, **transfers
    )
    engine.add_crowd()
    engine.run()
    for event in engine.logged(e.RequestPreempted):
        assert engine.check_answers(event.request_id)[-1].num_hit_tokens >= event.num_settled_tokens // 16 * 16
    figures = engine.figures
    assert figures.num_tokens_recovered + figures.num_tokens_retained > 0
    assert figures.num_tokens_recomputed == 0


def test_vllm_49674_every_preemption_is_followed_by_progress(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: a cascade of preemptions in which nobody gets anywhere, blocks fenced by a step in flight (UCM#1350)."""
    engine = make_engine(num_blocks=10, chunk_size=8, max_num_seqs=6, **runner, **transfers)
    engine.add_crowd(6)
    engine.run(max_steps=1500)
    assert engine.num_preemptions >= 5
    lost: dict[str, int] = {}
    for event in engine.logged(e.RequestPreempted):
        assert event.num_settled_tokens >= lost.get(event.request_id, 0)
        lost[event.request_id] = event.num_settled_tokens
    assert {len(output) for output in engine.outputs.values()} == {50}


def test_vllm_36812_no_figure_ever_falls(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: a negative increment killed the server: a resume hit more than at first admission (LMCache#2912)."""
    engine = make_engine(num_blocks=14, chunk_size=8, enable_prefix_caching=False, **runner, **transfers)
    ours: list[dict[str, Any]] = []
    take = engine.connector.get_kv_connector_stats
    monkeypatch.setattr(
        engine.connector, "get_kv_connector_stats", lambda: (stats := take()) and (ours.append(stats.data) or stats)
    )
    vllms: list[Any] = []
    make_stats = engine.scheduler.make_stats

    def watch(*arguments: Any, **options: Any) -> Any:
        vllms.append(make_stats(*arguments, **options))
        return vllms[-1]

    monkeypatch.setattr(engine.scheduler, "make_stats", watch)
    engine.add_crowd(4)
    engine.run()
    assert engine.num_preemptions
    assert len(ours) > 10
    figures = [value for data in ours for value in data.values()]
    assert all(min(value) >= 0 if isinstance(value, list) else value >= 0 for value in figures)
    assert {name for data in ours for name in data} & set(COUNTERS)
    external = [stats.connector_prefix_cache_stats for stats in vllms if stats is not None]
    counted = [stats for stats in external if stats is not None]
    assert counted
    assert all(0 <= stats.hits <= stats.queries for stats in counted)
