"""Incidents of loads that fail.

Elsewhere, in `test_failures.py`:
- vllm#39732, llm-d-kv-cache#514, vllm#52838 (a failing copy kills the worker).
- vllm#45138, #45430 (a failure with two steps in flight), and what of it vLLM 0.32 cannot do right.

Not met here: vllm#19330, #26813 (design threads).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sim.broken_copies import BROKEN
from sim.reported import note_reports

from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


def fail_loads(engine: Any, num_failures: int) -> None:
    """Let the next loads fail on the worker; asynchronous ones when they should have been done."""
    side, left = engine.worker._worker_side, [num_failures]

    def perhaps(load: Callable[..., Any]) -> Callable[..., Any]:
        def loads(slots: Any, block_ids: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise RuntimeError(BROKEN)
            return load(slots, block_ids)

        return loads

    side._engine.start_load = perhaps(side._engine.start_load)
    if side._async_engine is not None:
        side._async_engine._inner.start_load = perhaps(side._async_engine._inner.start_load)


@pytest.fixture(params=[False, True], ids=["v1", "v2"])
def one_step(request: pytest.FixtureRequest) -> dict[str, bool]:
    """Both model runners; failures with two steps in flight are vLLM's own affair in 0.32."""
    return {"model_runner_v2": request.param}


def test_vllm_55297_a_load_that_fails_is_not_tried_for_ever(
    make_engine: Any, one_step: dict[str, bool], transfers: dict[str, str], is_async: bool
) -> None:
    """Symptom: load fails, recompute from 0, the same hit, the same load: without end."""
    engine = make_engine(num_blocks=30, chunk_size=16, enable_prefix_caching=False, **one_step, **transfers)
    engine.serve("writer", range(64), 2)
    fail_loads(engine, 10_000)
    engine.serve("reader", range(70), 5, max_steps=30)
    assert len(engine.logged(e.LoadFailed, request_id="reader")) == 1
    tainted = {key for event in engine.logged(e.ChunksTainted) for key in event.keys}
    assert tainted == set(engine.logged(e.ChunkKeysObserved, request_id="writer")[0].keys)
    engine.serve("second reader", range(70), 5, max_steps=30)
    *offered, answer = engine.check_answers("second reader")
    loads = [load.request_id for load in engine.logged(e.LoadIssued)]
    if is_async:  # the first reader had computed nothing on what failed, so what it saved anew was offered once
        assert [earlier.num_hit_tokens for earlier in offered] == [64]
        assert (answer.num_hit_tokens, answer.miss_reason) == (0, "load_failed")
        assert loads == ["reader", "second reader"]
    else:
        assert offered == []
        assert (answer.num_hit_tokens, answer.miss_reason) == (0, "missing")
        assert loads == ["reader"]


def test_vllm_49250_what_a_sharer_computed_on_a_failed_load_is_not_saved(
    make_engine: Any, one_step: dict[str, bool], transfers: dict[str, str], is_async: bool
) -> None:
    """Symptom: wrong output: a sharer of the blocks went on while their owner computed them again.

    Here both compute them again, see `test_failed_loads.py`. With asynchronous loads nobody shares blocks
    before their load is done.
    """
    engine = make_engine(num_blocks=40, chunk_size=16, **one_step, **transfers)
    engine.serve("writer", range(64), 2)
    assert engine.scheduler.reset_prefix_cache()
    fail_loads(engine, 1)
    engine.add("owner", range(90), 30)
    engine.serve("sharer", [*range(64), *range(300, 320)], 30)
    engine.check_outputs()
    (failed,) = engine.logged(e.LoadFailed)
    concerned = {event.request_id for event in engine.logged(e.RequestQuarantined)}
    assert (failed.request_id in concerned) is not is_async
    position = next(index for index, (_, event) in enumerate(engine.events()) if isinstance(event, e.LoadFailed))
    later = [event for _, event in engine.events()[position:] if isinstance(event, e.SaveIssued)]
    assert not {save.request_id for save in later} & concerned
    for request_id, tokens in [(name, engine.prompts[name]) for name in ("owner", "sharer")]:
        assert engine.scheduler.reset_prefix_cache()
        engine.serve(f"{request_id} again", tokens, 5)
        assert len(engine.outputs[f"{request_id} again"]) == 5


def test_ascend_13099_blocks_that_are_not_filled_are_reported_to_the_scheduler(
    make_engine: Any, one_step: dict[str, bool], transfers: dict[str, str], is_async: bool
) -> None:
    """Symptom: failures were kept in a private set, and requests went on with garbage (LMCache#3388, vllm#52234)."""
    engine = make_engine(num_blocks=14, chunk_size=8, enable_prefix_caching=False, **one_step, **transfers)
    reported = note_reports(engine)
    fail_loads(engine, 1)
    engine.add_crowd()
    engine.run()
    (failed,) = engine.logged(e.LoadFailed)
    (load,) = [load for load in engine.logged(e.LoadIssued) if load.job_id == failed.job_id]
    blocks = {block for event in engine.logged(e.LoadErrorsObserved) for block in event.block_ids}
    if is_async:  # it hears of the request: nothing was computed on these blocks, so there is nothing to roll back
        assert reported.failed == [load.request_id]
        assert blocks == set()
    else:
        assert blocks == set(load.block_ids)
        assert engine.logged(e.TokensRolledBack)
    assert {len(output) for output in engine.outputs.values()} == {50}


def test_lmcache_2516_saving_after_a_rollback_is_sound(
    make_engine: Any, one_step: dict[str, bool], transfers: dict[str, str], is_async: bool
) -> None:
    """Symptom: crash in `wait_for_save`: the tokens had been rolled back, the tracker had not."""
    engine = make_engine(num_blocks=30, chunk_size=16, enable_prefix_caching=False, **one_step, **transfers)
    engine.serve("writer", range(64), 2)
    fail_loads(engine, 1)
    engine.add("reader", range(70), 60)
    engine.serve("other", range(500, 570), 60)
    rolled_back = [(event.request_id, event.num_computed_tokens) for event in engine.logged(e.TokensRolledBack)]
    assert rolled_back == ([] if is_async else [("reader", 0)]), "asynchronously it had not counted them yet"
    (failed,) = engine.logged(e.LoadFailed)
    assert failed.request_id == "reader"
    if is_async:
        assert engine.logged(e.SaveIssued, request_id="reader")
    assert engine.logged(e.SaveIssued, request_id="other")
    for request_id in ("reader", "other"):
        engine.serve(f"{request_id} again", engine.prompts[request_id] + engine.outputs[request_id], 3)
