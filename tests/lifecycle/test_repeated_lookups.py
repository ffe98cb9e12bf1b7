"""A lookup that is asked and answered as before costs the log a few bytes, and counts like any other."""

from __future__ import annotations

from itertools import pairwise

import pytest
from lifecycle_driver import Driver, keys_of
from lifecycle_driver.concerned import figures_of

from kvledger.lifecycle import Core, LookupsInFull, Replay, fold, lookups_in_full
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import EventEncoder

KEYS = keys_of("d", 4)


def waiting(num_requests: int = 1) -> Driver:
    """Requests that were each asked about once, and find the four chunks of an earlier one."""
    driver = Driver(chunk_size=16, num_slots=8)
    driver.save_prefix("earlier", KEYS)
    for number in range(num_requests):
        driver.arrive(str(number), 70, KEYS)
        assert driver.lookup(str(number), 0, 70).num_external_tokens == 64
    driver.ledger.commit()
    return driver


def written(driver: Driver, *names: str, num_computed_tokens: int = 0) -> list[e.Event]:
    """What it adds to the log that each of these is asked about."""
    driver.ledger.commit()
    before = len(driver.sink.events())
    for name in names:
        driver.poll(name, num_computed_tokens, 70)
    driver.ledger.commit()
    return [event for _, event in driver.sink.events()[before:]]


def test_question_and_answer_take_a_few_bytes_whatever_the_id() -> None:
    """They name the life by its ordinal, and say when it was asked."""
    driver = waiting()
    driver.arrive(long_id := "cmpl-" + "0" * 32, 70, KEYS)
    driver.lookup(long_id, 0, 70)
    asked, answered = written(driver, long_id)
    assert asked == e.LookupRequestedAgain(2, driver.projections.tracker.time_ns)
    assert answered == e.LookupAnsweredAgain(2, driver.ledger.next_sequence - 2)
    of_a_busy_day = [e.LookupRequestedAgain(300, 10**14), e.LookupAnsweredAgain(300, 70_000)]
    assert len(EventEncoder().encode(of_a_busy_day)) <= 25


def test_whoever_asks_is_answered_in_full() -> None:
    """How it is written is nobody's business but the log's."""
    driver = waiting()
    first = driver.lookup("0", 0, 70)
    again = driver.lookup("0", 0, 70)
    assert again == e.LookupAnswered(*driver.record("0").life, 0, 70, 64, 64, False, "complete", 0, again.cause)
    assert again.cause == first.cause + 2


def test_a_log_of_repeated_lookups_folds_to_the_state_in_which_it_was_written() -> None:
    """Whoever folds it knows the same of every projection, and counts the same; and it is sound."""
    driver = waiting(2)
    for name in ("0", "1", "1", "0"):
        written(driver, name)
    events = driver.sink.events()
    assert len([event for _, event in events if isinstance(event, e.RepeatedLookup)]) == 8
    assert driver.totals.figures.num_lookups == 7  # with that of the earlier request
    assert figures_of(events, driver.configuration) == driver.totals.figures
    assert fold(Core.standard(), events, driver.configuration).snapshot() == driver.projections.snapshot()
    audit = driver.audited()
    assert audit.is_sound
    assert audit.projections.snapshot() == driver.projections.snapshot()
    assert [event for _, event in lookups_in_full(events)] == driver.observed


def test_another_question_another_answer_and_another_reason_are_written_in_full() -> None:
    """Only what says nothing new is short: the local hit, a chunk that is gone, and why it is gone."""
    driver = waiting()
    kinds = [type(event) for event in written(driver, "0", num_computed_tokens=16)]
    assert kinds == [e.LookupRequested, e.LookupAnswered]
    driver.observe(e.ChunkTainted(KEYS[3], 1))
    tainted = driver.ledger.next_sequence - 1
    asked, answered = written(driver, "0", num_computed_tokens=16)
    assert isinstance(asked, e.LookupRequestedAgain)
    assert isinstance(answered, e.LookupAnswered)
    assert (answered.num_hit_tokens, answered.miss_reason, answered.miss_cause) == (48, "tainted", tainted)


def test_an_answer_that_was_claimed_or_taken_back_is_not_repeated() -> None:
    """A request that was given blocks and lost them asks anew."""
    driver = waiting()
    driver.allocate("0", range(5), 64)
    driver.step(("0", 64, 6, 70))
    driver.preempt("0", 64)
    assert [type(event) for event in written(driver, "0")] == [e.LookupRequested, e.LookupAnswered]


def test_every_now_and_then_a_lookup_is_written_in_full() -> None:
    """So whoever lacks the beginning of a log, or a part, knows a waiting request's answer again soon."""
    driver = waiting()
    events = written(driver, *("0" for _ in range(2000)))
    full = [place for place, event in enumerate(events) if isinstance(event, e.LookupAnswered)]
    assert 3 <= len(full) <= 4
    assert max(after - before for before, after in pairwise((0, *full, len(events)))) < 1100


def test_behind_a_gap_an_older_answer_is_not_taken_for_the_one_that_is_repeated() -> None:
    """The log does not say what it lost: nothing is known until an answer stands there in full."""
    driver = waiting()
    before = driver.sink.events()
    lost = written(driver, "0", num_computed_tokens=16)
    behind = written(driver, "0", num_computed_tokens=16)
    assert all(isinstance(event, e.RepeatedLookup) for event in behind)
    known = fold(Core.standard(), before, driver.configuration)
    known.lookup_cache.lose()
    in_full = LookupsInFull()
    for _, event in before:
        in_full(event)
    in_full.lose()
    for sequence, event in enumerate(behind, 1 + len(before) + len(lost)):
        assert known.lookup_cache.in_full(event) is in_full(event) is event
        known.fold(event, sequence)


@pytest.mark.parametrize("happens", ["saved", "tainted", "reset"])
def test_an_answer_that_says_as_before_where_another_is_right_is_found(happens: str) -> None:
    """A log that hides that by then more was there, or less: deciding again names the answer that it lacks."""
    driver = waiting()
    driver.arrive("long", 90, more := keys_of("d", 5))
    assert driver.lookup("long", 0, 90).num_hit_tokens == 64
    if happens == "saved":
        driver.save_prefix("later", more)
    elif happens == "tainted":
        driver.observe(e.ChunkTainted(KEYS[3], 1))
    else:
        driver.observe(e.CacheReset(1))
    driver.ledger.commit()
    before, ordinal, asked_at = driver.sink.events(), driver.record("long").ordinal, driver.ledger.next_sequence
    asked, answered = e.LookupRequestedAgain(ordinal, 10**9), e.LookupAnsweredAgain(ordinal, asked_at)
    audit = driver.audited([*before, (asked_at, asked), (asked_at + 1, answered)])
    assert asked_at + 1 in [divergence.sequence for divergence in audit.divergences]
    if happens != "tainted":  # of which a load would be named, when it is claimed
        rule = {"saved": "LONGEST_HIT", "reset": "LOOKUP_PURE"}[happens]
        assert audit.num_violations[rule] >= 1


@pytest.mark.parametrize("ordinal", [0, 9])
def test_a_repetition_of_nobodys_answer_is_found(ordinal: int) -> None:
    """Of a request that is gone, and of one that never was."""
    driver = waiting()
    sequence = driver.ledger.next_sequence
    audit = driver.audited([*driver.sink.events(), (sequence, e.LookupRequestedAgain(ordinal, 10**9))])
    assert audit.num_violations["LOOKUP_PURE"] == 1
    assert not audit.is_sound


def test_it_is_decided_again_from_any_moment() -> None:
    """A replay that begins at the state of a snapshot knows the answers that are repeated behind it."""
    driver = waiting(3)
    num_before = len(driver.sink.events())
    written(driver, "2", "0", "1")
    events = driver.sink.events()
    first = Replay(Core.standard(), driver.configuration)
    first.run(events[:num_before])
    audit = driver.audited(events[num_before:], start=first.projections)
    assert audit.is_sound
    assert audit.projections.snapshot() == driver.projections.snapshot()
