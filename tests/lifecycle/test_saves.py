"""Plans of saves: each kind of answer, asked for directly. A plan changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import events as e
from kvledger.lifecycle.decisions.saves import (
    Declined,
    Save,
    Source,
    TableTooShort,
    TailSave,
    plan_save,
    plan_tail,
    savable_pages,
)

NUM_TOKENS = 70
"""Four chunks of 16, and a tail of 6."""
TABLE = (11, 12, 13, 14, 15)


def computing(num_slots: int = 32, chunk_size: int = 16) -> Driver:
    """Request `a` has computed and settled all of its tokens, and nothing of it is saved."""
    driver = Driver(chunk_size=chunk_size, num_slots=num_slots)
    driver.start("a", keys_of("a", NUM_TOKENS // chunk_size), NUM_TOKENS, TABLE)
    return driver


def source_of(driver: Driver, table: Sequence[int] = TABLE, num_settled_tokens: int = NUM_TOKENS) -> Source:
    """The blocks of `a`, as at a preemption."""
    request, geometry = driver.record("a"), driver.projections.geometry
    savable = savable_pages(request, geometry, table, num_settled_tokens, None)
    return Source(table, savable, num_settled_tokens, request.generation, is_async=False, is_lost=True)


def planned(driver: Driver, source: Source | None = None, first_chunk: int = 0) -> object:
    """The plan to save the chunks of `a`; believed is the same after it."""
    projections, before = driver.projections, driver.projections.snapshot()
    source = source_of(driver) if source is None else source
    pool, geometry, unfilled = projections.pool, projections.geometry, projections.tracker.unfilled
    plan = plan_save(driver.record("a"), pool, geometry, unfilled, source, first_chunk)
    assert projections.snapshot() == before
    return plan


def planned_tail(driver: Driver, source: Source | None = None) -> object:
    """The plan to save the tail of `a`; believed is the same after it."""
    projections, before = driver.projections, driver.projections.snapshot()
    source = source_of(driver) if source is None else source
    pool, geometry, unfilled = projections.pool, projections.geometry, projections.tracker.unfilled
    plan = plan_tail(driver.record("a"), pool, geometry, unfilled, source)
    assert projections.snapshot() == before
    return plan


def occupied(driver: Driver, num_chunks: int, *, is_wanted: bool = False) -> tuple[bytes, ...]:
    """Keys of chunks that other requests left in the pool; with `is_wanted`, one of them will come back for them."""
    keys = keys_of("other", num_chunks)
    driver.save_prefix("other", keys)
    if is_wanted:
        driver.arrive("waiting", 16 * num_chunks + 1, keys)
        driver.lookup("waiting", 0, 16 * num_chunks + 1)
    return keys


# --- whole chunks ------------------------------------------------------------------------------


def test_with_room_every_settled_chunk_is_saved() -> None:
    """Each chunk of a block has one page."""
    assert planned(computing()) == Save([0, 1, 2, 3], [0, 1, 2, 3])


def test_chunks_before_the_first_one_are_not_asked_about() -> None:
    """The cursor is after them."""
    assert planned(computing(), first_chunk=3) == Save([3], [3])


def test_chunks_that_share_a_block_share_its_page() -> None:
    """Eight chunks of 8 tokens on four blocks."""
    plan = planned(computing(chunk_size=8))
    assert isinstance(plan, Save)
    assert (list(plan.chunks), list(plan.pages)) == (list(range(8)), [0, 1, 2, 3])


def test_a_chunk_that_is_saved_is_left_out() -> None:
    """It costs nothing."""
    driver = computing()
    driver.save_prefix("earlier", keys_of("a", 2))
    assert planned(driver) == Save([2, 3], [2, 3])


def test_chunks_that_are_being_saved_need_no_plan() -> None:
    """Nor do saved ones."""
    driver = computing()
    driver.step(settled=[("a", 0, NUM_TOKENS)])
    assert planned(driver) is None
    driver.settle_all()
    assert planned(driver) is None


def test_idle_chunks_are_evicted_for_a_save() -> None:
    """Only as many as it needs, the oldest first; the end of a prefix is older than its beginning."""
    driver = computing(num_slots=6)
    keys = occupied(driver, 4)
    assert planned(driver) == Save([0, 1, 2, 3], [0, 1, 2, 3], [keys[3], keys[2]])


def test_what_does_not_fit_is_declined_with_the_save_of_the_rest() -> None:
    """The chunks that are promised stay, so that there is room for two."""
    driver = computing(num_slots=6)
    occupied(driver, 4, is_wanted=True)
    assert planned(driver) == Save([0, 1], [0, 1], (), Declined(2, 2, e.POOL_FULL))


def test_without_any_room_all_chunks_are_declined() -> None:
    """Nothing is evicted for a save that is not made."""
    driver = computing(num_slots=4)
    occupied(driver, 4, is_wanted=True)
    assert planned(driver) == Declined(0, 4, e.POOL_FULL)


def test_a_shared_page_is_counted_once() -> None:
    """There is room for two pages, so for four chunks of 8."""
    driver = computing(num_slots=6, chunk_size=8)
    driver.save_prefix("other", keys_of("other", 8))
    driver.arrive("waiting", 65, keys_of("other", 8))
    driver.lookup("waiting", 0, 65)
    assert planned(driver) == Save([0, 1, 2, 3], (0, 1), (), Declined(4, 4, e.POOL_FULL))


def test_no_chunk_is_evicted_whose_page_others_need_if_what_fits_is_saved_without_it() -> None:
    """The last chunk of 8 could leave, but its page has one more that is promised, so no slot would become free."""
    driver = computing(num_slots=6, chunk_size=8)
    driver.save_prefix("other", keys_of("other", 8))
    driver.arrive("waiting", 57, keys_of("other", 7))
    driver.lookup("waiting", 0, 57)
    assert list(driver.projections.pool.forest.leaving(None)) == [keys_of("other", 8)[7]]
    assert planned(driver) == Save([0, 1, 2, 3], (0, 1), (), Declined(4, 4, e.POOL_FULL))


def test_chunks_on_blocks_that_a_load_did_not_fill_are_declined() -> None:
    """Also if only an earlier block of the table is unfilled: the others were computed on top of it."""
    driver = computing()
    driver.projections.tracker.unfilled.mark((TABLE[0],))
    assert planned(driver, first_chunk=2) == Declined(2, 2, e.UNFILLED)


def test_nothing_is_declined_if_nothing_would_be_saved() -> None:
    """A log would say so at every step."""
    driver = computing()
    driver.save_prefix("earlier", keys_of("a", 4))
    driver.projections.tracker.unfilled.mark((TABLE[0],))
    assert planned(driver) is None


def test_a_settled_chunk_without_a_block_is_named() -> None:
    """The last one, for which most blocks are missing."""
    driver = computing()
    assert planned(driver, source_of(driver, TABLE[:3])) == TableTooShort(3)


def test_of_a_group_with_a_window_the_pages_that_are_seen_are_saved() -> None:
    """Group 1 sees 32 tokens. The token after 64 sees the blocks from 2 on."""
    driver = Driver(chunk_size=16, windows=(0, 32))
    table = (*range(1, 5), 5, 6, 7, 8)
    driver.start("a", keys_of("a", 4), 64, table)
    assert planned(driver, source_of(driver, table, 64)) == Save((0, 1, 2, 3), [0, 2, 4, 5, 6, 7])


def test_a_stored_chunk_is_completed_with_a_page_that_it_lacks() -> None:
    """A longer request saved it without the page of the window, a shorter one still sees that page."""
    driver = Driver(chunk_size=16, windows=(0, 32))
    long, short = tuple(range(1, 13)), tuple(range(21, 25))
    driver.start("long", keys_of("a", 6), 96, long)
    driver.finish("long", 96, 98)
    driver.settle_all()
    driver.start("a", keys_of("a", 2), 32, short)
    assert planned(driver, source_of(driver, short, 32)) == Save((0, 1), [1, 3])


# --- tails -------------------------------------------------------------------------------------


def with_chunks_saved(num_slots: int = 32) -> Driver:
    """All whole chunks of `a` are saved."""
    driver = computing(num_slots)
    driver.step(settled=[("a", 0, NUM_TOKENS)])
    driver.settle_all()
    return driver


def test_a_tail_is_saved_once_the_chunks_before_it_are() -> None:
    """Or are being saved."""
    driver = computing()
    assert planned_tail(driver) is None
    driver.step(settled=[("a", 0, NUM_TOKENS)])
    assert planned_tail(driver) == TailSave(64, 6, range(4, 5))


@pytest.mark.parametrize("num_settled_tokens", [64, 48])
def test_there_is_no_tail_after_a_whole_chunk(num_settled_tokens: int) -> None:
    """Whole chunks have a plan of their own."""
    driver = with_chunks_saved()
    assert planned_tail(driver, source_of(driver, TABLE, num_settled_tokens)) is None


def test_a_tail_without_a_block_has_no_plan() -> None:
    """A chunk without one is named; the tail is left out."""
    driver = with_chunks_saved()
    assert planned_tail(driver, source_of(driver, TABLE[:4])) is None


def test_a_tail_on_top_of_unfilled_blocks_has_no_plan() -> None:
    """It would be wrong."""
    driver = with_chunks_saved()
    driver.projections.tracker.unfilled.mark((TABLE[2],))
    assert planned_tail(driver) is None


def test_an_idle_chunk_of_another_request_is_evicted_for_a_tail() -> None:
    """Those of the request itself stay: a tail without them is worth nothing."""
    driver = with_chunks_saved(num_slots=5)
    (key,) = occupied(driver, 1)
    assert planned_tail(driver) == TailSave(64, 6, range(4, 5), [key])


def test_a_tail_without_room_is_declined() -> None:
    """It is named by the chunk that it would have begun."""
    assert planned_tail(with_chunks_saved(num_slots=4)) == Declined(4, 1, e.POOL_FULL)
