"""Keys are fine, saves are coarse: what is saved when, and what others get of it."""

from __future__ import annotations

from typing import Any

import pytest

from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


def ends_of_saves(engine: Any, chunk_size: int = 16) -> list[int]:
    """The token behind each save of the request "a"; no chunk is saved twice."""
    saves = [save.chunks for save in engine.logged(e.SaveIssued, request_id="a")]
    assert sorted({chunk for chunks in saves for chunk in chunks}) == sorted(
        chunk for chunks in saves for chunk in chunks
    )
    return [(chunks[-1] + 1) * chunk_size for chunks in saves]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("chunk_size", [8, 16, 32])
def test_a_prompt_is_saved_at_once_and_what_is_decoded_by_intervals(
    make_engine: Any, async_scheduling: bool, chunk_size: int
) -> None:
    """And the end saves what is left, to the last whole chunk."""
    engine = make_engine(
        num_blocks=60, chunk_size=chunk_size, save_interval_tokens=64, async_scheduling=async_scheduling
    )
    engine.serve("a", range(40), 130)
    prompt_end, final_end = 40 // chunk_size * chunk_size, 169 // chunk_size * chunk_size
    assert ends_of_saves(engine, chunk_size) == [prompt_end, 64, 128, final_end]


@pytest.mark.parametrize(("num_prompt_tokens", "expected"), [(5, [32]), (20, [16, 48])])
def test_a_prompt_that_is_shorter_than_the_interval_is_saved_all_the_same(
    make_engine: Any, num_prompt_tokens: int, expected: list[int]
) -> None:
    """Unless it is shorter than a chunk; then the end saves it."""
    engine = make_engine(num_blocks=60, chunk_size=16, save_interval_tokens=64)
    engine.serve("a", range(num_prompt_tokens), 30)
    assert ends_of_saves(engine) == expected


def test_a_preemption_saves_every_whole_chunk(make_engine: Any) -> None:
    """Whatever its place in an interval, and the tail behind it: nothing is computed again."""
    engine = make_engine(num_blocks=60, chunk_size=16, save_interval_tokens=256)
    engine.add("a", range(40), 40)
    for _ in range(18):
        engine.step()
    assert ends_of_saves(engine) == [32]
    engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
    engine.run()
    assert ends_of_saves(engine)[:2] == [32, 48]
    assert engine.figures.num_tokens_recomputed == 0


def test_whoever_asks_the_same_gets_every_whole_block(make_engine: Any) -> None:
    """Of a prompt of 2,000 tokens all 125 blocks but the last token, which is computed in any case."""
    engine = make_engine(
        num_blocks=300, chunk_size=16, save_interval_tokens=256, enable_prefix_caching=False, max_model_len=2100
    )
    prompt = [token % 500 for token in range(2000)]
    engine.serve("a", prompt, 20)
    engine.serve("b", prompt, 2)
    assert engine.logged(e.LookupAnswered, request_id="b")[0].num_external_tokens == 1999


def test_whoever_asks_for_more_gets_what_was_decoded_to_the_last_whole_block(make_engine: Any) -> None:
    """The next turn of a conversation: the request that is continued has ended with 2,019 computed tokens."""
    engine = make_engine(
        num_blocks=300, chunk_size=16, save_interval_tokens=256, enable_prefix_caching=False, max_model_len=2200
    )
    prompt = [token % 500 for token in range(2000)]
    engine.serve("a", prompt, 20)
    engine.serve("b", [*prompt, *engine.outputs["a"], 7, 8, 9], 2)
    assert engine.logged(e.LookupAnswered, request_id="b")[0].num_external_tokens == 2019 // 16 * 16
