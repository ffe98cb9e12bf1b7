"""Steps are written by one encoder: what differs from the expected, from what a ledger has folded."""

from __future__ import annotations

from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import Scheduled, StepEncoder
from kvledger.lifecycle import events as e


def step(driver: Driver, *scheduled: Scheduled) -> e.StepScheduled:
    """A step is observed; returns what was written of it."""
    driver.schedule(*scheduled)
    return driver.all_of(e.StepScheduled)[-1]


def decoding() -> Driver:
    """`a` and `b` have computed a prompt of 20 tokens each, and decode."""
    driver = Driver()
    for request_id, block_ids in (("a", (1, 2)), ("b", (3, 4))):
        driver.arrive(request_id, 20, keys_of(request_id, 2))
        driver.lookup(request_id, 0, 20)
        driver.allocate(request_id, block_ids)
    step(driver, Scheduled("a", 0, 20, 20), Scheduled("b", 0, 20, 20))
    step(driver, Scheduled("a", 20, 1, 21), Scheduled("b", 20, 1, 21))
    return driver


def test_a_step_in_which_everybody_decodes_names_nobody() -> None:
    """They are counted all the same."""
    driver = decoding()
    written = step(driver, Scheduled("a", 21, 1, 22), Scheduled("b", 21, 1, 22))
    assert (written.advanced, written.paused, written.num_scheduled_tokens) == ((), (), 2)
    tracker = driver.projections.tracker
    assert [tracker.num_computed_tokens(record) for record in tracker] == [22, 22]


def test_whoever_is_left_out_is_paused_and_written_when_it_goes_on() -> None:
    """Its count stands still in between."""
    driver = decoding()
    ordinal = driver.record("b").ordinal
    assert step(driver, Scheduled("a", 21, 1, 22)).paused == (ordinal,)
    assert step(driver, Scheduled("a", 22, 1, 23)).paused == ()
    written = step(driver, Scheduled("a", 23, 1, 24), Scheduled("b", 21, 1, 22))
    assert written.advanced == ((ordinal, 21, 1, 22),)


def test_another_number_of_tokens_is_written() -> None:
    """As with drafts, or where the engine counts otherwise than the log."""
    driver = decoding()
    written = step(driver, Scheduled("a", 21, 3, 24), Scheduled("b", 20, 1, 21))
    assert [counts for _, *counts in written.advanced] == [[21, 3, 24], [20, 1, 21]]


def test_new_blocks_are_written_whether_or_not_the_request_is() -> None:
    """A decoding request gets one now and then."""
    driver = decoding()
    written = step(driver, Scheduled("a", 21, 1, 22, new_block_ids=(9,)), Scheduled("b", 21, 1, 22))
    assert (written.advanced, written.extended) == ((), ((driver.record("a").ordinal, (9,)),))
    assert tuple(driver.record("a").block_ids or ()) == (1, 2, 9)


def test_a_chunk_settles_once_its_tokens_are_written_and_its_key_is_known() -> None:
    """Tokens in flight are not written yet; a chunk without a key waits for it."""
    driver = Driver(chunk_size=16)
    driver.arrive("a", 40, keys_of("a", 1))
    driver.lookup("a", 0, 40)
    driver.allocate("a", (1, 2, 3))
    step(driver, Scheduled("a", 0, 33, 40))
    assert step(driver, Scheduled("a", 33, 3, 40, num_in_flight_tokens=33)).settled == ()
    assert step(driver, Scheduled("a", 36, 1, 40, num_in_flight_tokens=3)).settled == ((0, 0, 16, 3),)
    driver.keys("a", 1, keys_of("a", 1, first_chunk=1))
    assert step(driver, Scheduled("a", 37, 1, 40, num_in_flight_tokens=1)).settled == ((0, 1, 32, 1),)


def test_a_request_that_nobody_knows_is_counted_and_named_nowhere() -> None:
    """As one that arrived while a hook failed."""
    driver = decoding()
    written = step(driver, Scheduled("unknown", 0, 7, 7, new_block_ids=(8,)))
    assert (written.num_scheduled_tokens, written.advanced, written.extended) == (7, (), ())
    assert StepEncoder(driver.projections).paused(()) == ()
