"""LMCache#2158: "Mismatch in tokens to load: 256 vs 256 (tokens in lmcache) - 336 (tokens in vllm)".

A request computes 336 of its tokens and 256 of them are saved; it is preempted after one round, while vLLM still
finds the 336 in its prefix cache; it is polled for many rounds before there are blocks. LMCache answered 0 to the
first poll and forgot vLLM's 336 afterwards.

The numbers are the seed's own, and the preemption is real: the pool is exhausted, nothing is forced. A request that
decodes holds ten blocks; the preempted one got the other 22 for its first 340 tokens, of which 21 are full.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

NUM_PROMPT_TOKENS = 500


def preempt_after_one_round(make_engine: Any, *, chunk_size: int, num_holder_tokens: int, **options: Any) -> Any:
    """Run the case to its end; `num_holder_tokens` decides for how long the request is polled."""
    options.setdefault("save_tails", False)  # the seed's 256 saved of 336 computed: whole chunks only
    engine = make_engine(
        num_blocks=33, block_size=16, max_num_batched_tokens=341, chunk_size=chunk_size, replays=True, **options
    )
    # The seed's vLLM admitted a request as soon as its first chunk fitted (`scheduler_reserve_full_isl` is younger).
    engine.scheduler.scheduler_reserve_full_isl = False
    engine.add("holder", range(1000, 1158), num_holder_tokens)
    engine.step()
    engine.serve("preempted", range(NUM_PROMPT_TOKENS), 4)
    assert engine.num_preemptions == 1
    return engine


@pytest.mark.parametrize("model_runner_v2", [False, True])
def test_the_seed_s_own_numbers(make_engine: Any, model_runner_v2: bool) -> None:
    """336 in vLLM, 256 saved, polled until the holder is done, allocated with 336: every answer is 0."""
    engine = preempt_after_one_round(make_engine, chunk_size=256, num_holder_tokens=18, model_runner_v2=model_runner_v2)
    (preempted,) = engine.logged(e.RequestPreempted)
    assert preempted.request_id == "preempted"
    save = engine.logged(e.SaveIssued, request_id="preempted")[0]
    assert save.chunks == (0,), "256 of the 336 tokens are saved"

    polls = engine.check_answers("preempted")[1:]
    assert len(polls) > 10
    assert {(poll.num_hit_tokens, poll.num_computed_tokens) for poll in polls} == {(256, 336)}
    assert {poll.num_external_tokens for poll in polls} == {0}
    assert engine.logged(e.BlocksAllocated, request_id="preempted")[-1].num_external_tokens == 0
    assert engine.logged(e.LoadIssued, e.InvariantViolated, e.RequestQuarantined, e.HookFailed) == []
    assert engine.figures.num_tokens_retained == 336


@pytest.mark.parametrize("model_runner_v2", [False, True])
def test_what_is_in_flight_when_the_blocks_are_taken_is_saved(make_engine: Any, model_runner_v2: bool) -> None:
    """Two steps in flight: the 340 tokens have not been reported yet, but the copy is queued behind their forward."""
    engine = preempt_after_one_round(
        make_engine, chunk_size=256, num_holder_tokens=18, async_scheduling=True, model_runner_v2=model_runner_v2
    )
    polls = engine.check_answers("preempted")[1:]
    assert {poll.num_computed_tokens for poll in polls} == {336}
    assert {poll.num_external_tokens for poll in polls} == {0}
    assert [(poll.num_hit_tokens, poll.miss_reason) for poll in polls[:2]] == [(0, "saving"), (256, "complete")]
    assert {poll.num_hit_tokens for poll in polls[1:]} == {256}


def test_each_answer_follows_the_local_hit_of_its_own_call(make_engine: Any) -> None:
    """Polled for longer, vLLM's hit shrinks under the request: 336, 320, 304, 288, and the answer stays 0."""
    engine = preempt_after_one_round(make_engine, chunk_size=256, num_holder_tokens=60)
    polls = engine.check_answers("preempted")[1:]
    assert len(polls) > 50
    assert list(dict.fromkeys(poll.num_computed_tokens for poll in polls)) == [336, 320, 304, 288]
    assert {poll.num_external_tokens for poll in polls} == {0}


@pytest.mark.parametrize("chunk_size", [8, 16, 48])
def test_what_the_host_has_beyond_the_local_hit_is_loaded(make_engine: Any, chunk_size: int) -> None:
    """With small chunks all 336 tokens are saved; what vLLM has lost of them since is answered, allocated, loaded."""
    engine = preempt_after_one_round(make_engine, chunk_size=chunk_size, num_holder_tokens=60)
    polls = engine.check_answers("preempted")[1:]
    hits = {poll.num_hit_tokens for poll in polls}
    assert hits == {336}
    assert list(dict.fromkeys((poll.num_computed_tokens, poll.num_external_tokens) for poll in polls)) == [
        (336, 0),
        (320, 16),
        (304, 32),
        (288, 48),
    ]
    allocated = engine.logged(e.BlocksAllocated, request_id="preempted")[-1]
    assert allocated.num_external_tokens == 48
    (load,) = engine.logged(e.LoadIssued)
    assert (load.first_token, load.num_tokens) == (288, 48)
    assert load.block_ids == allocated.block_ids[18:21]
    assert engine.figures.num_tokens_retained == 288
    assert engine.figures.num_tokens_recovered == 48
    assert engine.logged(e.InvariantViolated) == []


def test_a_hit_that_ends_inside_the_local_hit_is_never_negative(make_engine: Any) -> None:
    """A chunk of 128: 256 saved again, but of two chunks; then the local hit falls below them and 0 turns positive."""
    engine = preempt_after_one_round(make_engine, chunk_size=128, num_holder_tokens=110)
    answers = engine.check_answers("preempted")[1:]
    pairs = list(dict.fromkeys((answer.num_computed_tokens, answer.num_external_tokens) for answer in answers))
    assert pairs == [(336, 0), (320, 0), (304, 0), (288, 0), (272, 0), (256, 0), (240, 16)]
    (load,) = engine.logged(e.LoadIssued)
    assert (load.first_token, load.num_tokens) == (240, 16)
