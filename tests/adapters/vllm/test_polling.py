"""A preempted request is polled in every step until there are blocks; polling changes nothing, answers follow vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from sim.modes import transfers_sync_and_async

from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.snapshots import capture, restore

pytestmark = pytest.mark.scheduler


def exhaust(make_engine: Any, **options: Any) -> Any:
    """Three blocks of 32 tokens are computed when the pool is exhausted; a decoding request eats them one by one."""
    options.setdefault("save_tails", False)  # answers are whole chunks, so that each can be told beforehand
    engine = make_engine(num_blocks=9, block_size=32, chunk_size=32, max_num_batched_tokens=101, **options)
    engine.scheduler.scheduler_reserve_full_isl = False
    engine.add("holder", range(1000, 1126), 94)
    engine.step()
    engine.step()
    engine.add("polled", range(200), 8)
    while not engine.num_preemptions:
        engine.step()
    return engine


def without_traces_of_lookups(engine: Any) -> dict[str, bytes]:
    """Everything that is known but the two slots, and when the last one was."""
    copied = restore(Core.standard(), capture(engine.projections), engine.projections.configuration)
    record = copied.tracker.get("polled")
    record.answer, record.answered_at = None, 0
    copied.lookup_cache.state.hits.pop(record.ordinal, None)
    copied.tracker.state.time_ns = 0
    return copied.snapshot()


@transfers_sync_and_async
@pytest.mark.parametrize("model_runner_v2", [False, True])
def test_dozens_of_polls_while_the_local_hit_shrinks(make_engine: Any, model_runner_v2: bool) -> None:
    """96, 64, 32 tokens are left in vLLM's cache; each answer fills up what is missing to the 96 that are saved."""
    engine = exhaust(make_engine, model_runner_v2=model_runner_v2)
    engine.run()
    assert engine.num_preemptions == 1
    polls = engine.check_answers("polled")[1:]
    assert len(polls) > 80
    assert {poll.num_hit_tokens for poll in polls} == {96}
    pairs = list(dict.fromkeys((poll.num_computed_tokens, poll.num_external_tokens) for poll in polls))
    assert pairs == [(96, 0), (64, 32), (32, 64)]
    (load,) = engine.logged(e.LoadIssued)
    assert (load.first_token, load.num_tokens) == (32, 64)
    assert engine.logged(e.InvariantViolated) == []


@transfers_sync_and_async
def test_any_number_of_polls_equals_one(make_engine: Any, transfers: str) -> None:
    """Thirty further polls with thirty counts leave what is believed as it was, but for the pending slot."""
    engine = exhaust(make_engine)
    engine.step()
    before = without_traces_of_lookups(engine)
    request = engine.scheduler.requests["polled"]
    answers = {
        num_computed_tokens: engine.connector.get_num_new_matched_tokens(request, num_computed_tokens)
        for _ in range(5)
        for num_computed_tokens in (96, 0, 64, 32, 128, 160)
    }
    is_async = transfers == "async"
    assert answers == {
        0: (96, is_async),
        32: (64, is_async),
        64: (32, is_async),
        96: (0, False),
        128: (0, False),
        160: (0, False),
    }
    assert without_traces_of_lookups(engine) == before
    pending = engine.projections.tracker.get("polled").answer
    assert (pending.num_computed_tokens, pending.num_tokens, pending.num_external_tokens) == (160, 200, 0)
    engine.run()
    engine.check_answers("polled")


@transfers_sync_and_async
def test_only_the_last_poll_binds_slots(make_engine: Any) -> None:
    """What a poll promised is kept from eviction, until the next poll promises something else."""
    engine = exhaust(make_engine)
    engine.step()
    request = engine.scheduler.requests["polled"]
    for num_computed_tokens, num_pinned in ((0, 3), (96, 0), (64, 3), (64, 3)):
        engine.connector.get_num_new_matched_tokens(request, num_computed_tokens)
        assert len(engine.projections.pool.promised.get("polled", ())) == num_pinned
    engine.abort("polled")
    assert "polled" not in engine.projections.pool.promised
    engine.run()


@transfers_sync_and_async
def test_a_count_inside_a_block_is_answered_with_nothing(make_engine: Any) -> None:
    """Pages are loaded whole; vLLM never asks with such a count, and is promised nothing if it does."""
    engine = exhaust(make_engine)
    engine.step()
    request = engine.scheduler.requests["polled"]
    assert engine.connector.get_num_new_matched_tokens(request, 40) == (0, False)
    engine.run()
