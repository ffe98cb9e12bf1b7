"""Incidents of endings: what is still issued, still bound, still owed, and who remembers.

Elsewhere:
- vllm#44100, #44101, LMCache#4512 (aborted between lookup and allocation): `test_hook_contract.py`.
- LMCache#2786, #1034, #3381 (a hit that vLLM has itself): `test_lookup_and_allocation.py`.
- vllm#43433, #46579, #46502, #42611 (the engine goes idle with copies to make): `test_hook_contract.py`.

Not met here: dynamo#7489, sglang#40334 (transfers between engines).
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


def test_vllm_49635_the_end_is_the_last_that_is_decided(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], is_async: bool
) -> None:
    """Symptom: KeyError: the manager was told that the request had finished, and then came its last store (#49671)."""
    engine = make_engine(num_blocks=30, chunk_size=16, enable_prefix_caching=False, **runner, **transfers)
    engine.add("writer", range(58), 7)  # 64 tokens are written, the last of them by the last step
    engine.run()
    events = [event for _, event in engine.events() if getattr(event, "request_id", "") == "writer"]
    position = next(index for index, event in enumerate(events) if isinstance(event, e.RequestFinished))
    kinds = [type(event) for event in events[position + 1 :]]
    held = [e.BlocksHeld] if is_async else []
    assert kinds == [e.SaveIssued, *held, e.SaveCompleted, e.RequestReleased]


def test_vllm_30745_nobody_is_remembered(make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]) -> None:
    """Symptom: a tracker entry was left of every request (#30745)."""
    engine = make_engine(num_blocks=30, chunk_size=8, max_num_seqs=6, **runner, **transfers)
    for number in range(40):
        engine.add(f"request {number}", range(number, number + 20 + number % 7), 1 + number % 9)
        if number % 5 == 4:
            engine.abort(f"request {number - 2}")
        engine.step()
    engine.run()
    assert len(engine.logged(e.RequestReleased)) == len(engine.logged(e.RequestArrived)) == 40


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_vllm_46283_an_abort_while_kv_comes_in_gives_every_block_back(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], is_async: bool, num_steps: int
) -> None:
    """Symptom: blocks of an aborted receive were never freed, or while they were still written (#46289, #32255)."""
    engine = make_engine(
        num_blocks=14, chunk_size=16, enable_prefix_caching=False, num_questions=6, **runner, **transfers
    )
    engine.serve("writer", range(128), 2)
    engine.add("gone", range(140), 20)
    engine.begin_step()
    for _ in range(num_steps):
        engine.step()
    assert engine.logged(e.LoadIssued, request_id="gone")
    engine.abort("gone")
    assert ("gone" in engine.scheduler.requests) is is_async, "vLLM keeps the blocks that are still written"
    engine.add("next", range(300, 440), 5)  # needs the blocks of the one that went
    engine.run(max_steps=50)
    assert len(engine.logged(e.LoadCompleted, e.LoadFailed, request_id="gone")) == 1
    del engine.outputs["gone"]


def test_sglang_32564_pages_in_transfer_outlive_their_request(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], report_late: Any
) -> None:
    """Symptom: pages were freed in the middle of a transfer on abort or retraction (#35049, #37103, #34519)."""
    engine = make_engine(num_blocks=30, chunk_size=8, host_bytes=1 << 13, **runner, **transfers)
    report_late(engine, 5)
    engine.add("gone", range(64), 20)
    for _ in range(4):
        engine.step()
    in_transfer = {slot for job in engine.projections.jobs for slot in job.slots}
    assert in_transfer
    engine.abort("gone")
    slots = engine.projections.slots
    assert all(slots.num_references(slot) for slot in in_transfer), "nobody else may be given them"
    for number in range(4):
        engine.add(f"next {number}", range(200 * number + 100, 200 * number + 164), 8)
    engine.run()
    del engine.outputs["gone"]


def test_everybody_is_aborted_in_whatever_state_they_are(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """LMCache#1252, #1254: whatever a request was promised is let go by its end, whichever end it is."""
    engine = make_engine(
        num_blocks=14, chunk_size=8, max_num_batched_tokens=48, enable_prefix_caching=False, **runner, **transfers
    )
    engine.add_crowd(6)
    for _ in range(300):
        engine.step()
        if engine.num_preemptions and engine.projections.pool.promised:
            break
    states = {str(record.state) for record in engine.projections.tracker}
    assert {"running", "preempted", "new"} <= states
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert engine.projections.pool.promised == {}
    engine.run(max_steps=10)
