"""Checkers know the part-filled last chunk of a preempted request: who may load it, and when no more."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import events as e
from kvledger.lifecycle.replay import SequencedEvent

NUM_SETTLED = 61
"""No multiple of a chunk of 4, 8, 16 or 32 tokens."""


def story_of_a_tail(chunk_size: int = 8, block_size: int = 16) -> Driver:
    """`a` and `c` are preempted with a tail each; `a` comes back by its tail while `b` needs room.

    Then `d` leaves a tail as well, which a reset makes stale.
    """
    chunks = NUM_SETTLED // chunk_size
    tail_pages = -(-(NUM_SETTLED % chunk_size) // block_size)
    # Room for the tails of `a` and `c`, the chunks of `a` and three blocks more: `b` has to evict what `old` left.
    driver = Driver(chunk_size=chunk_size, block_size=block_size, num_slots=7 + 2 * tail_pages)
    driver.save_prefix("old", keys_of("old", 32 // chunk_size))
    for request_id, first_block, count in (("a", 1, NUM_SETTLED), ("c", 11, NUM_SETTLED % chunk_size)):
        driver.start(
            request_id, keys_of(request_id, count // chunk_size), count + 1, range(first_block, first_block + 5)
        )
        driver.preempt(request_id, count)
        driver.step()
        driver.settle_all()
    driver.lookup("a", 0, NUM_SETTLED + 1)
    driver.start("b", keys_of("b", 48 // chunk_size), 49, range(20, 24))
    driver.step(("b", 49, 1, 50), settled=[("b", 0, 49)])
    driver.settle_all()
    driver.lookup("a", 0, NUM_SETTLED + 1)
    answer = driver.lookup("a", 0, NUM_SETTLED + 1)
    assert answer.num_external_tokens == NUM_SETTLED, "the story is about a hit that ends at a tail"
    driver.allocate("a", range(31, 36), NUM_SETTLED)
    driver.step(("a", NUM_SETTLED, 1, NUM_SETTLED + 1))
    driver.settle_all()
    for request_id in ("a", "b", "c"):
        driver.finish(request_id, NUM_SETTLED if request_id == "a" else 0, NUM_SETTLED + 2)
    driver.settle_all()
    driver.start("d", keys_of("d", chunks), NUM_SETTLED, range(40, 44))
    driver.preempt("d", 3)
    driver.step()
    driver.settle_all()
    driver.reset()
    driver.lookup("d", 0, NUM_SETTLED)
    driver.finish("d", 0, NUM_SETTLED)
    driver.step()
    driver.ledger.commit()
    return driver


@pytest.fixture(scope="module")
def tails() -> Driver:
    """The story with chunks of half a block, played once."""
    return story_of_a_tail()


def broken_rules(driver: Driver, events: list[SequencedEvent]) -> set[str]:
    """The rules that an audit names."""
    return {violation.rule for violation in driver.audited(events).violations}


def replaced(driver: Driver, old: e.Event, new: e.Event) -> list[SequencedEvent]:
    """The driver's log with one event, found by identity, replaced."""
    events = driver.events()
    (place,) = [place for place, (_, event) in enumerate(events) if event == old]
    assert new != old
    events[place] = (events[place][0], new)
    return events


def up_to_the_load(events: list[SequencedEvent]) -> list[SequencedEvent]:
    """The events up to the first load: what becomes of the request afterwards is left out."""
    return events[: 1 + next(place for place, (_, event) in enumerate(events) if isinstance(event, e.LoadIssued))]


def change(event: e.Event, **fields: object) -> e.Event:
    """The event with fields replaced."""
    return msgspec.structs.replace(event, **fields)


@pytest.mark.parametrize(("chunk_size", "block_size"), [(4, 16), (8, 16), (16, 16), (32, 16), (64, 16)])
def test_a_load_that_ends_at_a_tail_is_sound(chunk_size: int, block_size: int) -> None:
    """Tails are saved, loaded, dropped and made stale, and nothing is wrong with it."""
    driver = story_of_a_tail(chunk_size, block_size)
    assert len(driver.all_of(e.TailSaveIssued)) == 3
    assert [load.num_tokens for load in driver.all_of(e.LoadIssued)] == [NUM_SETTLED]
    audit = driver.audited(driver.sink.events())
    assert audit.violations == []
    assert audit.is_sound


def altered_tail(**fields: object) -> Callable[[Driver], tuple[e.Event, e.Event]]:
    """Change the save of the tail of `a`."""
    return lambda driver: (tail := driver.all_of(e.TailSaveIssued)[0], change(tail, **fields))


def altered_report(driver: Driver) -> tuple[e.Event, e.Event]:
    """Let the one rank report the tail of `a` twice at once."""
    job_id = driver.all_of(e.TailSaveIssued)[0].job_id
    (report,) = [report for report in driver.all_of(e.TransferReported) if job_id in report.job_ids]
    return report, change(report, ranks_done=(0, 0))


def altered_poll(driver: Driver) -> tuple[e.Event, e.Event]:
    """Let the first of two equal lookups forget the tail."""
    answer = [answer for answer in driver.all_of(e.LookupAnswered) if answer.num_external_tokens == NUM_SETTLED][-2]
    return answer, change(answer, num_hit_tokens=56, num_external_tokens=56)


ANSWERED = {"LONGEST_HIT"}
"""Named as well where an answer counts, or does not count, the tail in question."""


def altered_eviction(driver: Driver) -> tuple[e.Event, e.Event]:
    """Evict the last whole chunk that the pending answer to `a` promised, its tail behind it."""
    return driver.all_of(e.ChunksEvicted)[0], change(driver.all_of(e.ChunksEvicted)[0], keys=(keys_of("a", 7)[6],))


def altered_stale_hit(driver: Driver) -> tuple[e.Event, e.Event]:
    """Offer `d` the tail that it had before the reset."""
    answer = driver.all_of(e.LookupAnswered)[-1]
    return answer, change(answer, num_hit_tokens=3, num_external_tokens=3)


def altered_load(driver: Driver) -> tuple[e.Event, e.Event]:
    """Load the tail of `c` into the blocks of `a`."""
    (load,) = driver.all_of(e.LoadIssued)
    foreign = driver.all_of(e.TailSaveIssued)[1]
    assert foreign.request_id == "c"
    return load, change(load, slots=(*load.slots[:-1], foreign.slots[0]))


@pytest.mark.parametrize(
    ("rule", "alteration"),
    [
        ("CHUNK_COMPLETE", altered_tail(num_tokens=6)),
        ("SRC_BLOCK_OWNED", altered_tail(block_ids=(3,))),
        ("GEN_ISOLATION", altered_tail(generation=1)),
        ("COMPLETION_ONCE", altered_report),
        ("LOOKUP_PURE", altered_poll),
        ("HIT_PINNED", altered_eviction),
        ("RESET_EPOCH", altered_stale_hit),
        ("LOADABLE_AFTER_COMMIT", altered_load),
    ],
)
def test_one_altered_event_about_a_tail_is_named_by_exactly_its_checker(
    rule: str, alteration: Callable[[Driver], tuple[e.Event, e.Event]], tails: Driver
) -> None:
    """A tail is no chunk, but the rules of chunks hold for it."""
    assert broken_rules(tails, up_to_or_all(rule, replaced(tails, *alteration(tails)))) - ANSWERED == {rule}


def up_to_or_all(rule: str, events: list[SequencedEvent]) -> list[SequencedEvent]:
    """An evicted chunk is missed by the load as well, and its slots are written; that is others', and comes later."""
    if rule != "HIT_PINNED":
        return events
    place = next(place for place, (_, event) in enumerate(events) if isinstance(event, e.ChunksEvicted))
    return events[: place + 1]


def test_a_load_of_a_tail_whose_save_failed_is_named(tails: Driver) -> None:
    """Half a copy is no copy."""
    tail = tails.all_of(e.TailSaveIssued)[0]
    (done,) = [done for done in tails.all_of(e.SaveCompleted) if done.job_id == tail.job_id]
    failed = e.SaveFailed("a", tail.ordinal, tail.generation, tail.job_id, error="no", quiet=True, cause=done.cause)
    audit = tails.audited(replaced(tails, done, failed))
    assert {violation.rule for violation in audit.violations} - ANSWERED == {"LOADABLE_AFTER_COMMIT"}
    (found,) = [violation for violation in audit.violations if violation.rule not in ANSWERED]
    assert "tail of tokens 56 to 61 was dropped by save.failed" in found.detail


def test_a_load_of_a_tail_that_is_still_being_saved_is_named(tails: Driver) -> None:
    """It would read a page that is being written."""
    tail = tails.all_of(e.TailSaveIssued)[0]
    settling = {
        *(report for report in tails.all_of(e.TransferReported) if tail.job_id in report.job_ids),
        *(saved for saved in tails.all_of(e.SaveCompleted) if saved.job_id == tail.job_id),
    }
    events = [
        (sequence, e.LogNote("nothing", 1) if event in settling else event)
        for sequence, event in up_to_the_load(tails.events())
    ]
    audit = tails.audited(events)
    assert {violation.rule for violation in audit.violations} - ANSWERED == {"LOADABLE_AFTER_COMMIT"}
    (found,) = [violation for violation in audit.violations if violation.rule not in ANSWERED]
    assert "is not saved yet" in found.detail
    assert events[found.evidence[0] - 1][1] == tail


@pytest.mark.parametrize(
    "dropping",
    [
        e.PrefillAdvanced("a", 0, 1, 8, 62, 1),
        e.PrefillCompleted("a", 0, 1, 62, 62, 1),
        e.RequestPreempted("a", 0, 62, 1),
        e.SessionContinued("a", 61, 62, 62, 1),
        e.RequestQuarantined("a", 0, 1, "no", 1),
        e.CacheReset(1),
    ],
    ids=lambda event: event.id,
)
def test_a_load_of_a_dropped_tail_is_named_with_what_dropped_it(dropping: e.Event, tails: Driver) -> None:
    """What may no longer be true of the tokens must not come back."""
    if isinstance(dropping, e.RequestDecision):
        dropping = change(
            dropping, ordinal=next(a.ordinal for a in tails.all_of(e.RequestArrived) if a.request_id == "a")
        )
    events = up_to_the_load(tails.events())
    places = [
        place
        for place, (_, event) in enumerate(events)
        if isinstance(event, e.LookupRequested) and event.num_tokens == 62
    ]
    # It takes the place of a repeated lookup, so no sequence number changes.
    events[places[-2]] = (events[places[-2]][0], dropping)
    found = [v for v in tails.audited(events).violations if v.rule == "LOADABLE_AFTER_COMMIT"]
    assert any(f"was dropped by {dropping.id}" in violation.detail for violation in found)


def test_a_tail_of_an_earlier_life_is_not_loadable() -> None:
    """An id that is used again brings other tokens."""
    driver = Driver()
    for _ in range(2):
        driver.start("a", (), 6, (1,))
        driver.preempt("a", 5)
        driver.step()
        driver.settle_all()
        answer = driver.lookup("a", 0, 6)
        driver.allocate("a", (2,), answer.num_external_tokens)
        driver.step(("a", 5, 1, 6))
        driver.settle_all()
        driver.finish("a", 0, 7)
    driver.ledger.commit()
    first, second = driver.all_of(e.TailSaveIssued)
    assert broken_rules(driver, driver.sink.events()) == set()
    (done,) = [done for done in driver.all_of(e.SaveCompleted) if done.job_id == second.job_id]
    late = change(done, job_id=first.job_id, generation=first.generation)
    assert "LOADABLE_AFTER_COMMIT" in broken_rules(driver, replaced(driver, done, late))


def test_a_load_beyond_the_end_of_the_tail_is_named(tails: Driver) -> None:
    """Behind its last token the page holds what somebody else wrote."""
    (load,) = tails.all_of(e.LoadIssued)
    assert "LOADABLE_AFTER_COMMIT" in broken_rules(tails, replaced(tails, load, change(load, num_tokens=63)))


def test_a_tail_saved_for_a_finished_request_is_named(tails: Driver) -> None:
    """Nobody comes back for it."""
    (save,) = [save for save in tails.all_of(e.SaveIssued) if save.request_id == "old"]
    late = e.TailSaveIssued(
        save.request_id,
        save.ordinal,
        save.generation,
        save.job_id,
        0,
        4,
        save.slots[:1],
        save.block_ids[:1],
        save.cause,
    )
    assert {"FINISH_IS_LAST", "LEGAL_TRANSITION"} <= broken_rules(tails, replaced(tails, save, late))
