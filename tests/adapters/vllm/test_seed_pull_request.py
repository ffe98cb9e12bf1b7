"""LMCache#2007: two requests that saturate ten blocks; one is preempted and must come back with what it had.

The pull request's own log after its fix: "Total tokens 65, LMCache hit tokens: 40". What the model had said was
not looked up, so 25 of 65 tokens were computed twice.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

SERVER = {"num_blocks": 10, "block_size": 16, "chunk_size": 8, "enable_prefix_caching": False, "save_tails": False}
NUM_PROMPT_TOKENS = 43
NUM_OUTPUT_TOKENS = 5 + 16 * (10 - 3 - 1)


def saturate(make_engine: Any, **options: Any) -> Any:
    """The script of the pull request: both requests at once, each as long as all blocks together allow."""
    engine = make_engine(**(SERVER | options))
    engine.add("first", range(NUM_PROMPT_TOKENS), NUM_OUTPUT_TOKENS)
    engine.serve("second", range(200, 200 + NUM_PROMPT_TOKENS), NUM_OUTPUT_TOKENS)
    return engine


@pytest.mark.parametrize("model_runner_v2", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_preempted_request_loads_prompt_and_output(
    make_engine: Any, model_runner_v2: bool, async_scheduling: bool
) -> None:
    """64 of 65 tokens come back, 21 of them output; the pull request brought back 40."""
    engine = saturate(make_engine, model_runner_v2=model_runner_v2, async_scheduling=async_scheduling)

    (preempted,) = engine.logged(e.RequestPreempted)
    assert preempted.request_id == "second"
    assert preempted.num_settled_tokens == 64
    (load,) = engine.logged(e.LoadIssued)
    answer = engine.check_answers("second")[-1]
    assert load.request_id == "second"
    assert answer.num_tokens == 65
    assert (load.first_token, load.num_tokens) == (0, 64)
    assert load.num_tokens > NUM_PROMPT_TOKENS, "what the model had said is loaded as well"
    assert load.num_tokens > 40, "the pull request's own log"


def test_nothing_beyond_the_part_filled_chunk_is_computed_twice(make_engine: Any) -> None:
    """After the load one token is left, the one whose output is wanted next."""
    engine = saturate(make_engine)
    (preempted,) = engine.logged(e.RequestPreempted)
    (load,) = engine.logged(e.LoadIssued)
    first_step_back = next(
        (computed, scheduled)
        for event in engine.logged(e.StepScheduled)
        for ordinal, computed, scheduled, _ in event.advanced
        if ordinal == 1 and computed >= load.num_tokens
    )
    assert first_step_back == (64, 1)
    assert preempted.num_settled_tokens - load.num_tokens < SERVER["chunk_size"]
    assert engine.figures.num_tokens_recomputed == 0
    assert engine.figures.num_tokens_recovered == 64


def test_the_part_filled_last_chunk_is_not_loaded_before_it_is_whole(make_engine: Any) -> None:
    """With chunks of 32 on the same blocks, 64 tokens are two whole chunks; with 48 only one chunk is whole."""
    for chunk_size, num_loaded in ((32, 64), (48, 48)):
        engine = saturate(make_engine, chunk_size=chunk_size)
        (load,) = engine.logged(e.LoadIssued)
        assert (load.first_token, load.num_tokens) == (0, num_loaded)
        assert engine.figures.num_tokens_recomputed == 64 - num_loaded
        engine.check_outputs()


@pytest.mark.parametrize("chunk_size", [8, 16, 32, 48, 64, 160])
@pytest.mark.parametrize("model_runner_v2", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_with_its_tail_saved_the_preempted_request_loses_nothing(
    make_engine: Any, chunk_size: int, model_runner_v2: bool, async_scheduling: bool
) -> None:
    """Whatever the chunks, 64 of 65 tokens come back: what no chunk covers is loaded from the tail."""
    engine = saturate(
        make_engine,
        chunk_size=chunk_size,
        model_runner_v2=model_runner_v2,
        async_scheduling=async_scheduling,
        save_tails=True,
    )
    (load,) = engine.logged(e.LoadIssued)
    assert (load.first_token, load.num_tokens) == (0, 64)
    assert len(engine.logged(e.TailSaveIssued)) == (1 if 64 % chunk_size else 0)
    assert engine.figures.num_tokens_recomputed == 0


def test_a_full_hit_of_a_preempted_request_leaves_the_last_token_too(make_engine: Any) -> None:
    """A twin has saved all 64 tokens that the preempted request knows, its 64th still without KV of its own."""
    engine = make_engine(**(SERVER | {"num_blocks": 32}))
    engine.serve("twin", range(40), 40)
    request = engine.add("preempted", range(40), 40)
    while request.num_tokens < 64:
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    (preempted,) = engine.logged(e.RequestPreempted)
    assert preempted.num_settled_tokens == 63
    answer = engine.check_answers("preempted")[-1]
    assert (answer.num_tokens, answer.num_hit_tokens, answer.num_external_tokens) == (64, 64, 63)
