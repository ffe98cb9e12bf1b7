"""Incidents of resets, of waiting for ever, of ranks and of identity.

Elsewhere:
- vllm#57727, #42695 (a reset that leaves old KV in use): `test_hook_contract.py`; vllm#57810 (its opposite):
  `test_lookup_and_allocation.py`.
- tpu-inference#3152, ascend#16412, vllm#28768, vllm-omni#5636, TRT-LLM#14020 (one rank's word for all):
  `tests/lifecycle/test_transfers.py` and `tests/e2e/test_separate_processes.py`.
- vllm#42119, LMCache#1380 (what a key covers): `test_chunk_keys.py`; LMCache#4463, vllm#55907, #54363 (layouts):
  `tests/storage/kv/`.
- vllm#53861 (streaming sessions): `test_streaming_session.py`.

Not met here: vllm#57159, dynamo#12643 (no KV events are published).
"""

from __future__ import annotations

from typing import Any

import pytest

from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


@pytest.mark.parametrize("num_resets", [1, 2])
@pytest.mark.parametrize("reset_running_requests", [False, True])
def test_vllm_48090_a_reset_with_copies_in_flight_leaves_nothing_behind(
    make_engine: Any,
    runner: dict[str, bool],
    transfers: dict[str, str],
    report_late: Any,
    num_resets: int,
    reset_running_requests: bool,
) -> None:
    """Symptom: jobs from before the reset stayed for ever and deferred everything (#41956: three maps forgotten)."""
    engine = make_engine(num_blocks=14, chunk_size=8, enable_prefix_caching=False, **runner, **transfers)
    # As for a producer: for a consumer vLLM keeps the blocks of steps in flight, and refuses to reset meanwhile.
    engine.scheduler.defer_block_free = False
    report_late(engine, 3)
    engine.add_crowd()
    for _ in range(3):
        for _ in range(25):
            engine.step()
            if engine.projections.jobs:
                break
        for _ in range(num_resets):
            if reset_running_requests:
                assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            else:
                assert engine.connector.reset_cache()
    engine.run()
    assert len(engine.logged(e.CacheReset)) == 3 * num_resets
    assert engine.projections.pool._saving == {}
    assert {len(output) for output in engine.outputs.values()} == {50}


@pytest.mark.parametrize("num_questions", [1, 5])
def test_vllm_45388_requests_that_wait_for_their_kv_do_not_block_each_other(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], is_async: bool, num_questions: int
) -> None:
    """Symptom: deadlock: parked loads held all blocks, and the head of the queue did not fit (#45406, #57104)."""
    engine = make_engine(
        num_blocks=14, chunk_size=16, enable_prefix_caching=False, num_questions=num_questions, **runner, **transfers
    )
    for number in range(5):
        engine.add(f"writer {number}", range(300 * number, 300 * number + 96), 1)
    engine.run()
    for number in range(5):
        engine.add(f"reader {number}", range(300 * number, 300 * number + 96), 40)
    engine.step()
    assert [job.kind for job in engine.projections.jobs] == ["load", "load"] or not is_async, "13 blocks hold two"
    engine.run(max_steps=600)
    assert len(engine.logged(e.LoadIssued)) >= 5
    assert all(len(engine.outputs[f"reader {number}"]) == 40 for number in range(5))


def test_vllm_49829_nobody_waits_for_a_save_that_is_never_reported(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: a hit that was pending had no deadline (#49850, #46019, LMCache#5047: 600 s in production)."""
    engine = make_engine(
        num_blocks=30, chunk_size=16, enable_prefix_caching=False, max_silent_steps=10, **runner, **transfers
    )
    engine.worker._worker_side.take_reports = lambda: None
    engine.add("writer", range(64), 30)
    for _ in range(3):
        engine.step()
    assert engine.projections.jobs
    engine.add("reader", range(64), 5)
    for _ in range(40):
        engine.step()
        if len(engine.outputs["reader"]) == 5:
            break
    assert len(engine.outputs["reader"]) == 5
    engine.run()
    assert {violation.rule for violation in engine.logged(e.InvariantViolated)} == {"LIVENESS"}
