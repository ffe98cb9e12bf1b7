"""What an operator could change, by the reasons for which tokens were computed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvledger.adapters.tools.reasons import BY_DESIGN, Reason, Sums, advice
from kvledger.lifecycle import LedgerConfiguration
from kvledger.lifecycle.reader import Spent

S = 1_000_000_000
"""Nanoseconds."""


def missed(**num_tokens: int) -> Sums:
    """Sums in which so many tokens were missed, by reason."""
    sums = Sums()
    sums.missed = Counter({Reason(reason): number for reason, number in num_tokens.items()})
    return sums


def computed(**num_tokens: int) -> Sums:
    """The same, with those without `new` computed again after a preemption."""
    sums = missed(**num_tokens)
    sums.recomputed = Counter({reason: number for reason, number in sums.missed.items() if reason not in BY_DESIGN})
    return sums


def configured(**fields: Any) -> LedgerConfiguration:
    """Chunks of a block, if not otherwise."""
    return LedgerConfiguration(**{"block_size": 16, "chunk_size": 16, "num_slots": 4} | fields)


def test_the_reason_with_the_most_tokens_comes_first() -> None:
    """Each names the setting that changes it."""
    found = advice(missed(unsaved=30, evicted=50), configured(), None)
    assert list(found) == ["evicted", "unsaved"]
    assert "`host_bytes`" in found["evicted"]
    assert "`save_interval_tokens`" in found["unsaved"]


def test_a_reason_of_few_tokens_has_none() -> None:
    """Less than a tenth of what was computed."""
    assert list(advice(missed(unsaved=9, evicted=91), configured(), None)) == ["evicted"]


def test_advice_is_given_once() -> None:
    """The worker says why loads and saves fail."""
    assert list(advice(missed(save_failed=50, load_failed=40), configured(), None)) == ["save_failed"]


def test_what_is_missed_and_then_computed_again_counts_once() -> None:
    """A hundred of 1,100 tokens are less than a tenth."""
    assert list(advice(computed(new=1000, evicted=100), configured(), None)) == []


def test_tokens_that_nobody_had_computed_need_no_advice() -> None:
    """No setting spares them."""
    assert advice(computed(new=100, last_token=1), configured(), None) == {}


@pytest.mark.parametrize(("chunk_size", "expected"), [(16, []), (64, ["partial_chunk"])])
def test_chunks_can_be_no_smaller_than_a_block_with_profit(chunk_size: int, expected: list[str]) -> None:
    """VLLM matches whole blocks."""
    assert list(advice(computed(partial_chunk=40), configured(chunk_size=chunk_size), None)) == expected


def test_preemptions_are_named_if_they_cost_tokens() -> None:
    """Like a reason: not below a tenth of what was computed, nor if a reset preempted what runs."""
    assert list(advice(computed(evicted=10), configured(), None)) == ["evicted", "preempted"]
    assert list(advice(computed(evicted=40, unsaved=60), configured(), None)) == ["preempted", "unsaved", "evicted"]
    assert advice(computed(new=100, declined=9), configured(), None) == {}
    assert list(advice(computed(reset=10), configured(), None)) == ["reset"]


def test_preemptions_are_named_if_they_cost_time() -> None:
    """Incident: of 3 min 16 s a request was preempted for 2 min 3 s, and the advice was smaller chunks."""
    incident = Spent(13_700_000, 73_210_000_000, 123_000_000_000)
    found = advice(computed(new=80, partial_chunk=20), configured(chunk_size=64), incident)
    assert list(found) == ["preempted", "partial_chunk"]
    assert advice(computed(new=80), configured(), Spent(0, 95, 5)) == {}
    assert list(advice(computed(reset=10), configured(), Spent(0, 10, 90))) == ["reset"], "a reset preempts what runs"


def test_a_queue_is_named_if_it_cost_most_of_the_time() -> None:
    """Incident: of 5 min a request was queued for 4 min 58 s, and the advice was about chunks."""
    incident = Spent(298_000_000_000, 2_490_000_000)
    found = advice(computed(new=80, partial_chunk=20), configured(chunk_size=64), incident)
    assert list(found) == ["queued", "partial_chunk"]
    assert "`--max-num-seqs`" in found["queued"]
    assert advice(computed(new=80), configured(), Spent(40 * S, 60 * S)) == {}, "less than half"
    assert advice(computed(new=80), configured(), Spent(S // 20, S // 50)) == {}, "its load may have taken so long"
    assert advice(computed(new=80), configured(), Spent(9 * S, 2 * S), num_requests=100) == {}


def test_what_cost_more_time_comes_first() -> None:
    """Each of the two may be."""
    assert list(advice(computed(), configured(), Spent(60 * S, 0, 40 * S))) == ["queued", "preempted"]
    assert list(advice(computed(), configured(), Spent(50 * S, 0, 50 * S + 1))) == ["preempted"]
