"""What one request saved serves another: the same beginning, the same tenant, the same engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.engines import Reference, read_sound_log
from kvledger.adapters.lab.demo.engine import request_outputs, running_engine
from kvledger.adapters.lab.demo.workload import Workload
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.vllm

WORKLOAD = Workload(seed=21, num_requests=3, shortest_prompt=96, longest_prompt=96, max_tokens=24, num_blocks=128)


@pytest.mark.parametrize("chunk_size", [8, pytest.param(32, marks=pytest.mark.long)])
def test_a_second_wave_is_answered_from_the_host_pool(
    chunk_size: int, model: Path, reference: Reference, tmp_path: Path
) -> None:
    """Full hits: all but the last token of each prompt is loaded, that one is computed, and the outputs are equal."""
    prompts = WORKLOAD.prompts()
    expected = reference(prompts, WORKLOAD.max_tokens)
    with running_engine(model, WORKLOAD, tmp_path, chunk_size=chunk_size) as engine:
        assert engine.generate(prompts, WORKLOAD.max_tokens) == expected
        second = request_outputs(engine.llm, prompts, WORKLOAD.max_tokens)
    assert [list(output.outputs[0].token_ids) for output in second] == expected
    assert [output.num_cached_tokens for output in second] == [95] * 3  # vLLM's own count
    log = read_sound_log(engine.log_path)
    for arrival in log.of_type(e.RequestArrived)[3:]:
        (load,) = log.life_of(arrival.request_id, e.LoadIssued)
        assert (load.first_token, load.num_tokens) == (0, 95)
        assert log.steps_of(arrival.request_id)[0] == (95, 1)
    assert log.num_requests_left == 0


@pytest.mark.long
def test_a_continued_conversation_finds_what_was_said(model: Path, reference: Reference, tmp_path: Path) -> None:
    """A prompt made of an earlier prompt and its output hits the chunks of both."""
    (prompt, *_) = WORKLOAD.prompts()
    (said,) = reference([prompt], 100)
    longer = [prompt + said + [7, 8, 9]]
    expected = reference(longer, WORKLOAD.max_tokens)
    with running_engine(model, WORKLOAD, tmp_path) as engine:
        engine.generate([prompt], 100)
        (output,) = request_outputs(engine.llm, longer, WORKLOAD.max_tokens)
    assert list(output.outputs[0].token_ids) == expected[0]
    assert output.num_cached_tokens == 192  # whole chunks of 96 + 100 tokens
    read_sound_log(engine.log_path)


@pytest.mark.parametrize(
    ("chunk_size", "enable_prefix_caching"),
    [(8, False), pytest.param(32, False, marks=pytest.mark.long), pytest.param(32, True, marks=pytest.mark.long)],
)
def test_tenants_with_different_salts_never_share_a_chunk(
    chunk_size: int, enable_prefix_caching: bool, model: Path, reference: Reference, tmp_path: Path
) -> None:
    """The same prompt under two salts has no key in common; under the same salt it is found."""
    workload = Workload(seed=22, num_requests=1, num_blocks=128, enable_prefix_caching=enable_prefix_caching)
    prompts = workload.prompts()
    expected = reference(prompts, 16)
    with running_engine(model, workload, tmp_path, chunk_size=chunk_size) as engine:
        for salt in ("tenant one", "tenant two", "tenant one"):
            assert engine.generate(prompts, 16, cache_salt=salt) == expected
    log = read_sound_log(engine.log_path)
    one, two, one_again = (arrival.request_id for arrival in log.of_type(e.RequestArrived))
    assert log.keys_of(one)
    assert len(log.keys_of(one)) == len(log.keys_of(two))
    assert log.keys_of(one).isdisjoint(log.keys_of(two))
    assert log.keys_of(one) == log.keys_of(one_again)
    assert [answer.num_hit_tokens for answer in log.life_of(two, e.LookupAnswered)] == [0]
    (found,) = log.life_of(one_again, e.LookupAnswered)
    assert found.num_hit_tokens == len(prompts[0]) // chunk_size * chunk_size
    saved = [len(log.life_of(request_id, e.SaveIssued)) for request_id in (one, two, one_again)]
    assert saved[0] > 0
    assert saved[1] > 0
    assert saved[2] == 0  # nothing new to save


@pytest.mark.long
def test_a_restarted_engine_writes_a_log_of_its_own_and_starts_with_an_empty_pool(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    """Two logs in the same folder, both sound; what the first engine had saved died with it."""
    prompts = WORKLOAD.prompts()
    expected = reference(prompts, WORKLOAD.max_tokens)
    logs = []
    for _ in range(2):
        with running_engine(model, WORKLOAD, tmp_path) as engine:
            assert engine.generate(prompts, WORKLOAD.max_tokens) == expected
        logs.append(read_sound_log(engine.log_path))
    assert sorted(tmp_path.iterdir()) == sorted(log.path for log in logs)
    assert len({log.path for log in logs}) == 2
    assert [log.figures.num_tokens_loaded for log in logs] == [0, 0]


@pytest.mark.long
def test_a_pool_too_small_for_all_evicts_and_stays_correct(model: Path, reference: Reference, tmp_path: Path) -> None:
    """With eight slots and five chunks a request, chunks go and come; every output stays what it was."""
    page_bytes = 2 * 2 * 2 * 32 * 32 * 4  # layers, K and V, heads, head size, block size, float32
    prompts = WORKLOAD.prompts()
    expected = reference(prompts, 80)
    with running_engine(model, WORKLOAD, tmp_path, host_bytes=8 * page_bytes) as engine:
        for _ in range(3):
            assert [engine.generate([prompt], 80)[0] for prompt in prompts] == expected
    log = read_sound_log(engine.log_path)
    assert log.figures.num_chunks_evicted > 0
    assert log.num_requests_left == 0
    assert log.figures.num_preemptions == 0
