"""What may be made of a hit: limits and statistics, alone and composed."""

from __future__ import annotations

from typing import Any

import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.policies import ChunkStatistics, HitLimit, LongestPrefix, LookupPolicy, build_policy
from kvledger.lifecycle.projections.tracker import RequestRecord, RequestTracker


def with_hit(**configuration: Any) -> Driver:
    """A request `a` of 40 tokens, 32 of them saved."""
    driver = Driver(**configuration)
    driver.save_prefix("earlier", keys_of("d", 4))
    driver.arrive("a", 40, keys_of("d", 4))
    return driver


@pytest.mark.parametrize(("share", "expected"), [(1.0, 32), (0.5, 20), (0.25, 10), (0.0, 0)])
def test_a_hit_limit_cuts_the_answer_at_a_share_of_the_prompt(share: float, expected: int) -> None:
    """However much is there."""
    assert with_hit(max_hit_share=share).lookup("a", 0, 40).num_external_tokens == expected


def test_a_limited_answer_says_that_it_was_limited() -> None:
    """And still tells how much there was."""
    answer = with_hit(max_hit_share=0.5).lookup("a", 0, 40)
    assert (answer.miss_reason, answer.num_hit_tokens) == ("limited", 32)


def test_the_limit_counts_local_tokens_too() -> None:
    """A share of the prompt is a share of the prompt, wherever it comes from."""
    assert with_hit(max_hit_share=0.5).lookup("a", 16, 40).num_external_tokens == 4


def test_a_limit_that_is_not_reached_changes_nothing() -> None:
    """32 of 40 tokens are less than nine tenths."""
    assert with_hit(max_hit_share=0.9).lookup("a", 0, 40).miss_reason == "complete"


def test_chunk_statistics_count_a_chunk_once_per_request_however_often_it_is_polled() -> None:
    """A lookup changes nothing, also not a statistic."""
    driver = with_hit(chunk_statistics=True)
    before = driver.projections.snapshot()["policy"]
    for _ in range(5):
        driver.lookup("a", 0, 40)
    assert driver.projections.snapshot()["policy"] == before
    policy = driver.projections.policy
    assert (policy.num_chunks, policy.num_unique_chunks, policy.num_tokens_reusable) == (8, 4, 32)
    assert policy.num_requests_with(keys_of("d", 1)[0]) == 2
    assert policy.num_requests_with(b"never seen") == 0


def test_keys_that_a_request_brings_again_are_not_counted_again() -> None:
    """Keys may be observed anew, as after a preemption; the request is still one request."""
    driver = with_hit(chunk_statistics=True)
    driver.keys("a", 0, keys_of("d", 4))
    assert driver.projections.policy.num_requests_with(keys_of("d", 1)[0]) == 2


@pytest.fixture
def tracker() -> RequestTracker:
    """Of one request, `a`."""
    tracker = RequestTracker(Core.standard())
    tracker.folds()[e.RequestArrived](e.RequestArrived("a", 0, 40, 1), 1)
    return tracker


RECORD = RequestRecord("a", 0, num_prompt_tokens=40, num_tokens=40)


@pytest.mark.parametrize("limit_outside", [True, False])
def test_limit_and_statistics_compose_in_both_orders(tracker: RequestTracker, limit_outside: bool) -> None:
    """Both do their work, whichever wraps the other."""
    policy: LookupPolicy
    if limit_outside:
        statistics = ChunkStatistics(LongestPrefix(), tracker, 8)
        policy = HitLimit(statistics, 0.5)
    else:
        policy = statistics = ChunkStatistics(HitLimit(LongestPrefix(), 0.5), tracker, 8)
    assert policy.usable_tokens(32, RECORD) == 20
    assert policy.usable_tokens(8, RECORD) == 8
    policy.folds()[e.ChunkKeysObserved](e.ChunkKeysObserved("a", 0, keys_of("d", 3)), 1)
    assert statistics.num_unique_chunks == 3


def test_two_limits_give_the_smaller_and_two_statistics_count_alike(tracker: RequestTracker) -> None:
    """Wrappers do not know what they wrap."""
    assert HitLimit(HitLimit(LongestPrefix(), 0.25), 0.5).usable_tokens(32, RECORD) == 10
    inner = ChunkStatistics(LongestPrefix(), tracker, 8)
    outer = ChunkStatistics(inner, tracker, 8)
    outer.folds()[e.ChunkKeysObserved](e.ChunkKeysObserved("a", 0, keys_of("d", 3)), 1)
    assert (inner.num_chunks, outer.num_chunks) == (3, 3)


@pytest.mark.parametrize(
    ("configuration", "expected"),
    [
        ({}, LongestPrefix),
        ({"max_hit_share": 0.5}, HitLimit),
        ({"chunk_statistics": True}, ChunkStatistics),
        ({"max_hit_share": 0.5, "chunk_statistics": True}, ChunkStatistics),
    ],
)
def test_the_configuration_decides_what_wraps_the_longest_prefix(
    tracker: RequestTracker, configuration: dict[str, Any], expected: type
) -> None:
    """What is not asked for is not there."""
    policy = build_policy(LedgerConfiguration(16, 8, 32, **configuration), tracker)
    assert type(policy) is expected
    assert policy.usable_tokens(40, RECORD) == (20 if "max_hit_share" in configuration else 40)
