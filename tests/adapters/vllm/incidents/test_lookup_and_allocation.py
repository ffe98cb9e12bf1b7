"""Incidents of lookups and allocations: what is asked, what is answered, what is taken up.

Elsewhere:
- LMCache#1969, #1361, PR#2007 and #2158: `test_seed_pull_request.py` and `test_seed_assertion.py`.
- vllm#43884, #44329, #50454, #52807 (a count derived again at allocation): `test_polling.py` lets it shrink meanwhile.
- vllm#44585, #57596 (requests that must not read caches): `test_hook_contract.py`.
- vllm#46951, #46865, #55209, #51805, LMCache#4355, #4762 (somebody else loads): `test_multi_connector.py`.

Not met here: 1Cat#567 (several KV cache groups, refused at start).
"""

from __future__ import annotations

from typing import Any

import pytest

from kvledger.adapters.lab.simulation.hashed_model import block_bytes
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


def test_lmcache_4508_polls_do_not_move_what_is_saved(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: looked up n times for want of blocks, the store cursor stood at n hits and what lay between was lost."""
    engine = make_engine(num_blocks=12, chunk_size=16, enable_prefix_caching=False, **runner, **transfers)
    engine.serve("writer", range(48), 2)
    engine.add("holder", range(500, 600), 30)
    engine.step()
    engine.serve("polled", range(80), 20)
    answers = engine.check_answers("polled")
    assert len(answers) > 5
    assert {answer.num_hit_tokens for answer in answers} == {48}
    saved = [chunk for save in engine.logged(e.SaveIssued, request_id="polled") for chunk in save.chunks]
    assert saved == [3, 4, 5], "everything behind the hit, once, in order"


def test_vllm_39702_what_was_promised_survives_another_request_s_save(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: "Expected N hit tokens, got 0": the hit was evicted by a store between lookup and allocation."""
    engine = make_engine(
        num_blocks=12, chunk_size=16, enable_prefix_caching=False, host_bytes=6 * block_bytes(16), **runner, **transfers
    )
    engine.serve("writer", range(64), 2)
    promised = engine.logged(e.ChunkKeysObserved, request_id="writer")[0].keys
    engine.add("holder", range(500, 600), 40)
    engine.step()
    engine.serve("polled", range(80), 3)
    answers = [answer for answer in engine.check_answers("polled") if not answer.generation]
    assert len(answers) > 5
    assert {answer.num_external_tokens for answer in answers} == {64}
    declined = engine.logged(e.SaveDeclined, request_id="holder")
    assert declined, "the holder's chunks wanted the room of what was promised"
    assert not {key for evicted in engine.logged(e.ChunksEvicted) for key in evicted.keys} & set(promised)
    assert engine.logged(e.LoadIssued, request_id="polled")[0].num_tokens == 64


def test_vllm_18232_one_admission_is_one_load(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: when a load was done, the request was promoted, looked up and loaded a second time."""
    engine = make_engine(num_blocks=30, chunk_size=16, enable_prefix_caching=False, **runner, **transfers)
    engine.serve("writer", range(64), 2)
    engine.serve("reader", range(70), 20)
    assert len(engine.check_answers("reader")) == 1
    (load,) = engine.logged(e.LoadIssued, request_id="reader")
    (completed,) = engine.logged(e.LoadCompleted, request_id="reader")
    assert completed.job_id == load.job_id
    first, *later = [event.num_external_tokens for event in engine.logged(e.BlocksAllocated, request_id="reader")]
    assert first == 64
    assert not any(later)


@pytest.mark.parametrize("chunk_size", [8, 16, 32])
@pytest.mark.parametrize("num_tokens", [16, 31, 32, 33, 64])
def test_vllm_50864_a_full_hit_leaves_exactly_the_last_token(
    make_engine: Any, transfers: dict[str, str], num_tokens: int, chunk_size: int
) -> None:
    """Symptom: `assert num_new_tokens > 0` where a hit covered the whole prompt (also LMCache#3322, #5151, #5249)."""
    engine = make_engine(num_blocks=30, chunk_size=chunk_size, enable_prefix_caching=False, **transfers)
    for request_id in ("writer", "reader"):
        engine.serve(request_id, range(num_tokens), 40)
    (answer,) = engine.check_answers("reader")
    # The writer went on, so the chunk that the prompt ends in is not the reader's, unless it ends with one.
    assert answer.num_hit_tokens == num_tokens // chunk_size * chunk_size
    assert engine.num_tokens_computed("reader") >= 1
    loaded = sum(load.num_tokens for load in engine.logged(e.LoadIssued, request_id="reader"))
    assert loaded == min(answer.num_hit_tokens, num_tokens - 1)


def test_vllm_34616_a_load_that_ends_inside_a_block_counts_its_tokens_not_its_blocks(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: wrong KV after a load that ended mid-block, because computed tokens were counted in blocks."""
    engine = make_engine(num_blocks=30, chunk_size=8, enable_prefix_caching=False, **runner, **transfers)
    engine.serve("writer", range(24), 1)
    engine.serve("reader", [*range(24), *range(700, 710)], 5)
    (load,) = engine.logged(e.LoadIssued, request_id="reader")
    assert (load.first_token, load.num_tokens, len(load.block_ids)) == (0, 24, 2)
    ordinal = engine.logged(e.RequestArrived, request_id="reader")[0].ordinal
    first = next(entry for step in engine.logged(e.StepScheduled) for entry in step.advanced if entry[0] == ordinal)
    assert first == (ordinal, 24, 10, 34)


def test_vllm_45268_a_reset_of_the_gpu_s_cache_alone_leaves_the_host_s(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: EngineDead when the same prompt came after a reset that kept the CPU tier (vllm#57810 wants it kept)."""
    engine = make_engine(num_blocks=30, chunk_size=16, **runner, **transfers)
    engine.serve("writer", range(64), 2)
    assert engine.scheduler.reset_prefix_cache()
    engine.serve("reader", range(64), 2)
    (answer,) = engine.check_answers("reader")
    assert (answer.num_computed_tokens, answer.num_external_tokens) == (0, 63)
    assert [load.num_tokens for load in engine.logged(e.LoadIssued)] == [63]
    assert engine.logged(e.CacheReset) == []


def test_lmcache_2786_a_local_hit_that_covers_the_host_s_binds_nothing(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: pins of a lookup were never released when vLLM's own hit was as long (also LMCache#1034, #3381)."""
    engine = make_engine(num_blocks=30, chunk_size=16, **runner, **transfers)
    engine.serve("writer", range(64), 2)
    engine.add("reader", range(70), 9)
    engine.step()
    assert engine.projections.pool.promised == {}
    engine.run()
    (answer,) = engine.check_answers("reader")
    assert (answer.num_hit_tokens, answer.num_computed_tokens, answer.num_external_tokens) == (64, 64, 0)
    assert engine.logged(e.LoadIssued) == []


def test_vllm_56640_nothing_to_read_is_nothing_to_wait_for(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: a full local hit left a load of no blocks, whose completion nobody ever reported."""
    engine = make_engine(num_blocks=30, chunk_size=16, **runner, **transfers)
    for request_id in ("writer", "reader"):
        engine.serve(request_id, range(65), 3, max_steps=20)
    assert engine.check_answers("reader")[0].num_computed_tokens == 64
    assert engine.logged(e.LoadIssued) == []
    assert len(engine.outputs["reader"]) == 3
