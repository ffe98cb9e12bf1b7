"""What an operator could change, by the reasons for which tokens were computed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvledger.adapters.tools.reasons import BY_DESIGN, Reason, Sums, advice
from kvledger.lifecycle import LedgerConfiguration


def computed(**num_tokens: int) -> Sums:
    """Sums in which so many tokens were missed, by reason, and those without `new` computed again."""
    sums = Sums()
    sums.missed = Counter({Reason(reason): number for reason, number in num_tokens.items()})
    sums.recomputed = Counter({reason: number for reason, number in sums.missed.items() if reason not in BY_DESIGN})
    return sums


def configured(**fields: Any) -> LedgerConfiguration:
    """Chunks of a block, if not otherwise."""
    return LedgerConfiguration(**{"block_size": 16, "chunk_size": 16, "num_slots": 4} | fields)


def test_the_reason_with_the_most_tokens_comes_first() -> None:
    """Each names the setting that changes it."""
    found = advice(computed(unsaved=30, evicted=50), configured(), 0)
    assert list(found) == ["evicted", "unsaved"]
    assert "`host_bytes`" in found["evicted"]
    assert "`save_interval_tokens`" in found["unsaved"]


def test_a_reason_of_few_tokens_has_none() -> None:
    """Less than a tenth of what was computed."""
    assert list(advice(computed(unsaved=9, evicted=91), configured(), 0)) == ["evicted"]


def test_advice_is_given_once() -> None:
    """The worker says why loads and saves fail."""
    assert list(advice(computed(save_failed=50, load_failed=40), configured(), 0)) == ["save_failed"]


def test_what_is_missed_and_then_computed_again_counts_once() -> None:
    """A hundred of 1,100 tokens are less than a tenth."""
    assert list(advice(computed(new=1000, evicted=100), configured(), 0)) == []


def test_tokens_that_nobody_had_computed_need_no_advice() -> None:
    """No setting spares them."""
    assert advice(computed(new=100, last_token=1), configured(), 0) == {}


@pytest.mark.parametrize(("chunk_size", "expected"), [(16, []), (64, ["partial_chunk"])])
def test_chunks_can_be_no_smaller_than_a_block_with_profit(chunk_size: int, expected: list[str]) -> None:
    """VLLM matches whole blocks."""
    assert list(advice(computed(partial_chunk=40), configured(chunk_size=chunk_size), 0)) == expected


def test_preemptions_are_named_if_they_cost_tokens() -> None:
    """After everything else."""
    assert list(advice(computed(evicted=10), configured(), 1)) == ["evicted", "preempted"]
    assert advice(computed(), configured(), 1) == {}
    assert list(advice(computed(reset=10), configured(), 1)) == ["reset"], "a reset preempts what runs"
