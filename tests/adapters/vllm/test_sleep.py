"""Sleep: vLLM pauses, resets the caches, takes the KV memory away, and must not be made to step until it wakes up.

On CPU vLLM 0.32 ignores the part about the memory; what it asks of the connector before that is the same.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


def go_to_sleep(engine: Any, mode: str) -> None:
    """What `sleep(level=1, mode=...)` does in an engine core of its own (v1/engine/core.py, 0.32)."""
    if mode == "abort":
        engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
    for _ in range(100):
        if not engine.scheduler.has_requests() and not engine._in_flight:
            break
        engine.step() if engine.scheduler.has_requests() else engine.update()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    for tensor in engine.model.kv_caches.values():
        tensor.fill_(-1)


@pytest.mark.parametrize("mode", ["keep", "abort"])
@pytest.mark.parametrize("num_steps", [1, 3, 9, 20])
def test_an_engine_that_sleeps_is_left_alone(
    make_engine: Any, runner: dict[str, bool], mode: str, num_steps: int
) -> None:
    """No copy waits for a step: it would read memory that is not there. After it wakes up, everybody goes on."""
    engine = make_engine(num_blocks=30, chunk_size=8, max_num_batched_tokens=64, enable_prefix_caching=False, **runner)
    for number in range(3):
        engine.add(f"request {number}", range(100 * number, 100 * number + 43), 30)
    for _ in range(num_steps):
        engine.step()
    go_to_sleep(engine, mode)
    assert not engine.connector.has_pending_push_work()
    assert not engine.scheduler.has_requests()
    assert len(engine.projections.pool) == 0
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    num_loads = len(engine.logged(e.LoadIssued))
    engine.run()
    if mode == "keep":
        assert {len(output) for output in engine.outputs.values()} == {30}
        assert len(engine.logged(e.LoadIssued)) == num_loads, "nothing of before the sleep comes back"
    for number in range(3):
        engine.serve(f"after {number}", [*range(100 * number, 100 * number + 43), 7], 3)


# --- what vLLM 0.33 asks of the worker; 0.32 does not call it ---------------------------------------


def lose_kv_memory(engine: Any) -> None:
    """Sleep takes what is in the KV caches, and the prefix cache with it."""
    engine.worker.unregister_kv_caches()
    engine.worker.unregister_kv_caches()
    for tensor in engine.model.kv_caches.values():
        tensor.fill_(-1)
    assert engine.scheduler.reset_prefix_cache()


def test_what_was_saved_before_a_sleep_is_loaded_after_it(make_engine: Any) -> None:
    """The host pool is no KV memory; copies that were under way are finished before it goes."""
    engine = make_engine(num_blocks=30, chunk_size=8, save_mode="async")
    engine.serve("writer", range(64), 4)
    lose_kv_memory(engine)
    engine.worker.restore_kv_caches()
    engine.serve("reader", range(70), 8)
    assert engine.figures.num_tokens_loaded >= 64


def test_a_copy_while_the_memory_is_gone_fails_and_is_computed(make_engine: Any) -> None:
    """Nothing is read from or written to memory that is not there; the request computes, and so does everybody."""
    engine = make_engine(num_blocks=30, chunk_size=8)
    engine.serve("writer", range(64), 4)
    lose_kv_memory(engine)
    engine.serve("reader", range(70), 8)
    assert len(engine.logged(e.LoadFailed)) == 1
    assert "sleeps" in engine.logged(e.LoadFailed)[0].error
