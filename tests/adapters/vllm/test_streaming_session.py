"""Streaming input: a session's next turn arrives like a new request, with its old blocks and without a lookup.

vLLM 0.32's OffloadingConnector appends the table of the second turn to that of the first; it stores chunks of the
second turn from blocks of the first, and whoever asks for that prompt later reads wrong KV without a word.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from sim.modes import runners

from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


def next_turn(engine: Any, request_id: str, tokens: Any, max_tokens: int) -> None:
    """The client sends more input to an open session; what was said so far stays in `outputs`."""
    said, asked = engine.outputs[request_id], engine.prompts[request_id]
    engine.add(request_id, tokens, max_tokens, resumable=True)
    engine.outputs[request_id], engine.prompts[request_id] = said, asked


def hold_session(engine: Any) -> list[int]:
    """Three turns, no multiple of a block or a chunk; returns all tokens the session knows at last."""
    engine.serve("session", range(45), 13, resumable=True)
    for first, num_tokens in ((300, 40), (400, 23)):
        next_turn(engine, "session", range(first, first + num_tokens), 10)
        engine.run()
    return list(engine.scheduler.requests["session"].all_token_ids)


@runners
def test_each_turn_replaces_the_block_table(make_engine: Any, runner: dict[str, bool]) -> None:
    """The folded table is the scheduler's own after every turn: nothing stands in it twice."""
    engine = make_engine(num_blocks=40, chunk_size=8, **runner)
    hold_session(engine)
    tables = [event.block_ids for event in engine.logged(e.BlocksAllocated, request_id="session")]
    assert len(tables) == 3
    for shorter, longer in itertools.pairwise(tables):
        assert longer[: len(shorter)] == shorter
        assert len(set(longer)) == len(longer)
    (held,) = engine.scheduler.kv_cache_manager.get_block_ids("session")
    assert list(engine.projections.tracker.get("session").block_ids or ()) == held
    assert len(engine.logged(e.SessionContinued)) == 2
    assert engine.logged(e.BlockTableObserved, e.InvariantViolated) == []
    engine.abort("session")
    engine.run()
    del engine.outputs["session"]


@runners
@pytest.mark.parametrize("chunk_size", [8, 16, 32])
def test_a_later_request_with_the_whole_conversation_loads_correct_kv(
    make_engine: Any, runner: dict[str, bool], chunk_size: int
) -> None:
    """The model reads what was loaded and would raise `CorruptKV`; every whole chunk of all turns is loaded."""
    engine = make_engine(num_blocks=40, chunk_size=chunk_size, enable_prefix_caching=False, **runner)
    tokens = hold_session(engine)
    engine.abort("session")
    engine.run()
    del engine.outputs["session"]
    engine.serve("reader", tokens, 8)
    (load,) = engine.logged(e.LoadIssued)
    num_settled = len(tokens) - 1
    assert (load.first_token, load.num_tokens) == (0, num_settled // chunk_size * chunk_size)


@runners
def test_the_dropped_token_s_chunk_gets_another_key(make_engine: Any, runner: dict[str, bool]) -> None:
    """The last sampled token of a turn is dropped; the key of its chunk must not survive it."""
    engine = make_engine(num_blocks=40, chunk_size=8, **runner)
    # 40 + 8 tokens: with the dropped one the sixth chunk would be whole.
    engine.serve("session", range(40), 8, resumable=True)
    next_turn(engine, "session", range(300, 310), 4)
    engine.run()
    tokens = list(engine.scheduler.requests["session"].all_token_ids)
    assert tokens[47] == 300
    keys = list(engine.projections.tracker.get("session").keys)
    engine.abort("session")
    engine.run()
    del engine.outputs["session"]
    engine.serve("reader", tokens, 1)
    observed = engine.logged(e.ChunkKeysObserved, request_id="reader")
    assert [key for event in observed for key in event.keys][: len(keys)] == keys


@runners
def test_turns_that_wait_in_the_queue(make_engine: Any, runner: dict[str, bool]) -> None:
    """The client is faster than the model: two more turns arrive while the first one decodes."""
    engine = make_engine(num_blocks=40, chunk_size=8, enable_prefix_caching=False, **runner)
    engine.add("session", range(45), 13, resumable=True)
    for _ in range(4):
        engine.step()
    for first, num_tokens in ((300, 40), (400, 23)):
        next_turn(engine, "session", range(first, first + num_tokens), 10)
    engine.run()
    assert len(engine.logged(e.SessionContinued)) == 2
    assert len(engine.outputs["session"]) == 33
    tokens = list(engine.scheduler.requests["session"].all_token_ids)
    engine.end_session("session")
    engine.run()
    engine.check_released()
    del engine.outputs["session"]
    engine.serve("reader", tokens, 8)
    assert engine.logged(e.LoadIssued)[0].num_tokens == (len(tokens) - 1) // 8 * 8


@runners
def test_a_session_is_preempted_in_its_second_turn(make_engine: Any, runner: dict[str, bool]) -> None:
    """It recovers what it had computed in both turns."""
    engine = make_engine(num_blocks=14, chunk_size=8, enable_prefix_caching=False, **runner)
    engine.add("holder", range(1000, 1060), 60)
    engine.add("session", range(45), 13, resumable=True)
    while not engine.finish_reasons.get("session"):
        engine.step()
    next_turn(engine, "session", range(300, 340), 20)
    engine.run()
    assert engine.num_preemptions >= 1
    preempted = engine.logged(e.RequestPreempted, request_id="session")[0]
    load = engine.logged(e.LoadIssued, request_id="session")[0]
    assert load.num_tokens == preempted.num_settled_tokens // 8 * 8 > 58
    tokens = list(engine.scheduler.requests["session"].all_token_ids)
    engine.abort("session")
    engine.run()
    del engine.outputs["session"]
    engine.serve("reader", tokens, 4)
