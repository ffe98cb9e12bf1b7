"""A burst with one prefix loads it once: the others wait for that load, and vLLM shares the blocks afterwards.

vllm#29087: each request of a burst loads the same prefix, which fills the device with copies. vllm#44294: everybody
waits for one load, also those who gain nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import Core, Replay
from kvledger.lifecycle import events as e

PREFIX = keys_of("prefix", 4)


def loading(also: tuple[bytes, ...] = (), **configuration: Any) -> tuple[Driver, e.LoadIssued]:
    """Request `a` loads a prefix of four chunks of 16 tokens; `also` is on the host as well."""
    settings = {"awaits_shared_loads": True, "async_load_tokens": 0, "max_deferred_lookups": 2, **configuration}
    driver = Driver(chunk_size=16, num_slots=64, **settings)
    for number, keys in enumerate(filter(None, (PREFIX, also))):
        driver.save_prefix(f"earlier {number}", keys, first_block=800 + 50 * number)
    driver.arrive("a", 74, PREFIX)
    load = driver.allocate("a", range(5), driver.lookup("a", 0, 74).num_external_tokens)[0]
    assert isinstance(load, e.LoadIssued)
    return driver, load


def asks(driver: Driver, keys: tuple[bytes, ...] = PREFIX, num_computed_tokens: int = 0) -> e.Event:
    """Request `b` arrives with these chunks and is looked up."""
    driver.arrive("b", len(keys) * 16 + 10, keys)
    return driver.poll("b", num_computed_tokens, len(keys) * 16 + 10)


def replayed(driver: Driver) -> None:
    """The log gives the same decisions again, and breaks no rule."""
    driver.ledger.commit()
    replay = Replay(Core.standard(), driver.configuration, reference=Core.standard().reference)
    replay.run(driver.sink.events())
    assert (replay.divergences, replay.reference_differences) == ([], [])
    assert driver.audited().violations == []


def test_a_lookup_waits_while_another_request_loads_the_same_chunks() -> None:
    """However often it is asked, for the load ends by itself; then vLLM's prefix cache has the blocks."""
    driver, load = loading()
    deferred = [asks(driver), *(driver.poll("b", 0, 74) for _ in range(20))]
    assert {(type(each), each.job_id, each.num_deferred) for each in deferred} == {  # type: ignore[attr-defined]
        (e.LookupDeferred, load.job_id, 1)
    }
    driver.report(load.job_id)
    assert driver.lookup("b", 64, 74).num_external_tokens == 0
    replayed(driver)


def test_a_lookup_that_waits_keeps_nothing_that_the_answer_before_it_promised() -> None:
    """World 1700: the promise stayed, and an audit that began after it did not know why a save was declined."""
    settings = {"awaits_shared_loads": True, "async_load_tokens": 0, "max_deferred_lookups": 2}
    driver, beginning = Driver(chunk_size=16, num_slots=6, **settings), PREFIX[:2]
    driver.save_prefix("earlier", PREFIX, first_block=800)
    driver.arrive("b", 74, PREFIX)
    assert driver.lookup("b", 0, 74).num_external_tokens == 64
    driver.arrive("a", 42, beginning)
    driver.allocate("a", range(3), driver.lookup("a", 0, 42).num_external_tokens)
    assert isinstance(driver.poll("b", 0, 74), e.LookupDeferred)
    assert driver.projections.pool.promised == {}
    driver.save_prefix("later", keys_of("later", 3), first_block=850)
    assert any(
        isinstance(event, e.ChunksEvicted) and not set(PREFIX).isdisjoint(event.keys) for event in driver.observed
    )
    replayed(driver)


@pytest.mark.parametrize("why", ["failed", "aborted", "preempted", "reset"])
def test_a_load_that_will_not_be_shared_is_not_waited_for(why: str) -> None:
    """Its blocks do not come into vLLM's prefix cache."""
    driver, load = loading(num_ranks=2)
    assert isinstance(asks(driver), e.LookupDeferred)
    if why == "failed":
        driver.report(load.job_id, ok=False, num_ranks=1)
    elif why == "aborted":
        driver.finish("a", 0, 74)
    elif why == "preempted":
        driver.preempt("a", 0)
    else:
        driver.reset()
    answer = driver.lookup("b", 0, 74)
    assert answer.num_external_tokens == (0 if why == "reset" else 64)


def test_a_load_that_has_failed_releases_those_that_waited() -> None:
    """What could not be loaded is not offered again, so they compute it."""
    driver, load = loading()
    assert isinstance(asks(driver), e.LookupDeferred)
    driver.report(load.job_id, ok=False)
    assert driver.lookup("b", 0, 74).num_external_tokens == 0
    replayed(driver)


def test_a_silent_load_is_waited_for_until_it_counts_as_failed() -> None:
    """A rank that never reports keeps nobody waiting for ever."""
    driver, _ = loading(max_silent_steps=2)
    assert isinstance(asks(driver), e.LookupDeferred)
    for _ in range(8):
        driver.step()
    assert isinstance(driver.poll("b", 0, 74), e.LookupAnswered)


@pytest.mark.parametrize(
    "configuration",
    [
        {"awaits_shared_loads": False},  # vLLM's prefix cache is off: everybody needs blocks of its own
        {"max_deferred_lookups": 0},
        {"async_load_tokens": None},  # blocks of a load within the step are shared at once
    ],
)
def test_nobody_waits_where_waiting_gains_nothing_or_is_not_wanted(configuration: dict[str, Any]) -> None:
    """It is answered with a load of its own."""
    driver, _ = loading(**configuration)
    answer = asks(driver)
    assert isinstance(answer, e.LookupAnswered)
    assert answer.num_external_tokens == 64


def test_who_shares_nothing_is_answered_at_once() -> None:
    """Another prompt's load is no reason to wait."""
    driver, _ = loading(keys_of("other", 4))
    answer = asks(driver, keys_of("other", 4))
    assert isinstance(answer, e.LookupAnswered)
    assert answer.num_external_tokens == 64


@pytest.mark.parametrize(
    ("num_shared", "num_chunks", "waits"), [(0, 4, False), (1, 4, True), (2, 4, True), (1, 8, True), (4, 4, True)]
)
def test_it_waits_for_whatever_it_shares(num_shared: int, num_chunks: int, *, waits: bool) -> None:
    """Conversations with one system prompt and long histories loaded it once each when only half or more counted."""
    mine = PREFIX[:num_shared] + keys_of("mine", num_chunks - num_shared, num_shared)
    driver, _ = loading(mine)
    assert isinstance(asks(driver, mine), e.LookupDeferred if waits else e.LookupAnswered)


def test_what_vllm_has_already_does_not_count() -> None:
    """The load brings what its own prefix cache gave this request; the rest is the request's alone."""
    mine = PREFIX + keys_of("mine", 2, 4)
    driver, _ = loading(mine)
    answer = asks(driver, mine, num_computed_tokens=64)
    assert isinstance(answer, e.LookupAnswered)
    assert answer.num_external_tokens == 32


def test_a_row_of_loads_is_bounded() -> None:
    """Each load counts once; after `max_deferred_lookups` of them the request is answered."""
    driver, load = loading()
    assert isinstance(asks(driver), e.LookupDeferred)
    for number in range(2):
        driver.report(load.job_id)
        driver.arrive(f"next {number}", 74, PREFIX)
        answer = driver.lookup(f"next {number}", 0, 74)
        load = driver.allocate(f"next {number}", range(10 * number + 10, 10 * number + 15), answer.num_external_tokens)[
            0
        ]  # type: ignore[assignment]
        last = driver.poll("b", 0, 74)
    assert isinstance(last, e.LookupAnswered)
    assert last.num_external_tokens == 64
    replayed(driver)


def test_a_snapshot_knows_for_which_load_somebody_waits() -> None:
    """A reader that starts there counts the row as the log does, and audits it as sound."""
    driver, load = loading()
    asks(driver)
    driver.ledger.commit()
    middle = driver.folded().start()
    num_events = len(driver.sink.events())
    again = driver.poll("b", 0, 74)
    assert isinstance(again, e.LookupDeferred)
    assert (again.job_id, again.num_deferred) == (load.job_id, 1)
    driver.ledger.commit()
    assert driver.audited(driver.sink.events()[num_events:], start=middle).violations == []
