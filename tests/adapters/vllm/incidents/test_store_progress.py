"""Incidents of how far saving has come: chunks that are left out, saved twice, or never looked at again.

Not met here: vllm#52735, #52771, #47890 (hits per KV cache group; there is only one).
"""

from __future__ import annotations

from typing import Any

import pytest

from kvledger.adapters.lab.simulation.hashed_model import block_bytes
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


def saved_chunks(engine: Any, request_id: str) -> list[int]:
    """Every chunk that was saved for a request, in order, as often as it was."""
    return [chunk for save in engine.logged(e.SaveIssued, request_id=request_id) for chunk in save.chunks]


@pytest.mark.parametrize("budget", [15, 24])
@pytest.mark.parametrize("chunk_size", [8, 16, 32])
def test_vllm_46971_no_chunk_is_left_out_where_two_steps_meet(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], budget: int, chunk_size: int
) -> None:
    """Symptom: external hit rate 0: the block that two steps of a chunked prefill share was jumped over."""
    engine = make_engine(
        num_blocks=30,
        chunk_size=chunk_size,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        enable_prefix_caching=False,
        **runner,
        **transfers,
    )
    engine.serve("writer", range(150), 2)
    assert saved_chunks(engine, "writer") == list(range(151 // chunk_size))
    engine.serve("reader", range(150), 2)
    assert engine.check_answers("reader")[0].num_hit_tokens == 150 // chunk_size * chunk_size


@pytest.mark.parametrize("chunk_size", [8, 16])
def test_vllm_33881_what_is_decoded_is_saved_while_it_is_decoded(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], chunk_size: int
) -> None:
    """Symptom: with two steps in flight decoded tokens were never offloaded, their hashes not yet known (#27648)."""
    engine = make_engine(num_blocks=30, chunk_size=chunk_size, enable_prefix_caching=False, **runner, **transfers)
    engine.add("writer", range(10), 70)
    while len(engine.outputs["writer"]) < 60:
        engine.step()
    # Of the tokens known by now, those of the last steps are not settled or not noticed yet.
    assert saved_chunks(engine, "writer") == list(range((10 + 60 - 3) // chunk_size))
    engine.run()
    assert saved_chunks(engine, "writer") == list(range(79 // chunk_size))


@pytest.mark.parametrize("num_output_tokens", [5, 6, 7, 8, 9])
def test_vllm_53498_a_chunk_that_its_last_step_fills_is_saved_at_the_end(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], num_output_tokens: int
) -> None:
    """Symptom: the backlog was dropped at the end, 44 % of the blocks never stored."""
    engine = make_engine(num_blocks=30, chunk_size=16, enable_prefix_caching=False, **runner, **transfers)
    engine.serve("writer", range(58), num_output_tokens)
    num_written = 58 + num_output_tokens - 1
    assert saved_chunks(engine, "writer") == list(range(num_written // 16))
    engine.serve("reader", [*range(58), *engine.outputs["writer"], 7], 2)
    assert engine.check_answers("reader")[0].num_hit_tokens == num_written // 16 * 16


def test_vllm_47234_what_was_evicted_below_the_cursor_is_saved_again_in_the_end(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: chunks evicted in the middle of a request were never stored again; the cursor was believed (#47235)."""
    engine = make_engine(
        num_blocks=40, chunk_size=16, enable_prefix_caching=False, host_bytes=8 * block_bytes(16), **runner, **transfers
    )
    engine.add("long", range(64), 60)
    for _ in range(6):
        engine.step()
    engine.add("passing", range(500, 628), 2)
    while "passing" in engine.scheduler.requests:
        engine.step()
    beginning = set(engine.logged(e.ChunkKeysObserved, request_id="long")[0].keys)
    assert {key for evicted in engine.logged(e.ChunksEvicted) for key in evicted.keys} & beginning
    engine.run()
    engine.serve("reader", range(64), 2)
    assert engine.check_answers("reader")[0].num_hit_tokens == 64


@pytest.mark.parametrize("budget", [15, 16, 17])
def test_lmcache_653_only_whole_chunks_are_saved_and_each_once(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], budget: int
) -> None:
    """Symptom: saves of a single token, and a dropped tail chunk, around every chunk boundary (#2540)."""
    engine = make_engine(
        num_blocks=30,
        chunk_size=16,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        enable_prefix_caching=False,
        **runner,
        **transfers,
    )
    engine.serve("writer", range(65), 33)
    assert saved_chunks(engine, "writer") == list(range(6))
    assert all(len(save.block_ids) == len(save.chunks) for save in engine.logged(e.SaveIssued))


def test_lmcache_3145_progress_never_goes_back_within_a_life(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: `num_saved_tokens` fell between the chunks of one prefill."""
    engine = make_engine(
        num_blocks=14, chunk_size=8, max_num_batched_tokens=24, enable_prefix_caching=False, **runner, **transfers
    )
    engine.add_crowd()
    engine.run()
    progress: dict[int, int] = {}
    ordinals = {arrival.request_id: arrival.ordinal for arrival in engine.logged(e.RequestArrived)}
    for _, event in engine.events():
        if isinstance(event, e.RequestPreempted):
            progress.pop(ordinals[event.request_id], None)
        elif isinstance(event, e.StepScheduled):
            for ordinal, _, num_settled_tokens, _ in event.settled:
                assert num_settled_tokens >= progress.get(ordinal, 0)
                progress[ordinal] = num_settled_tokens
    assert len(progress) == 3
    assert engine.num_preemptions
