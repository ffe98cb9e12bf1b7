"""A save is declined for want of room: in vain, if a chunk that nobody relies on could have made room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import events as e

STORED = keys_of("stored", 2)


def crowded(num_slots: int, **configuration: Any) -> Driver:
    """Both chunks of `STORED` are in the pool."""
    driver = Driver(chunk_size=16, num_slots=num_slots, **{"save_tails": False, **configuration})
    driver.save_prefix("first", STORED)
    return driver


def press(driver: Driver) -> None:
    """Another request saves one chunk."""
    driver.start("new", keys_of("new", 1), 17, (100, 101))
    driver.step(settled=[("new", 0, 16)])
    driver.ledger.commit()


def promised_to_its_end() -> Driver:
    """A lookup's answer lets the scheduler count on both."""
    driver = crowded(2)
    driver.arrive("reader", 33, STORED)
    driver.lookup("reader", 16, 33)
    return driver


def waited_for() -> Driver:
    """A preempted request comes back for both."""
    driver = crowded(2)
    driver.start("reader", STORED, 33, (1, 2, 3), num_computed=32)
    driver.preempt("reader", 32)
    return driver


def before_what_is_loaded() -> Driver:
    """A load reads the second; the first is in vLLM's own cache."""
    driver = crowded(2, async_load_tokens=0)
    driver.admit("reader", STORED, 33, (1, 2, 3), num_computed=16, num_external=16)
    return driver


def before_what_is_saved() -> Driver:
    """A third chunk is on its way."""
    driver = crowded(3, async_saves=True)
    driver.start("writer", (*STORED, *keys_of("more", 1)), 49, (1, 2, 3, 4), num_computed=32)
    driver.step(settled=[("writer", 0, 48)])
    return driver


def before_a_tail_that_is_saved() -> Driver:
    """Half a chunk is on its way."""
    driver = crowded(3, save_tails=True, keep_for_preempted=False)
    driver.start("writer", STORED, 41, (1, 2, 3), num_computed=32)
    driver.preempt("writer", 41)
    return driver


HELD = [promised_to_its_end, waited_for, before_what_is_loaded, before_what_is_saved, before_a_tail_that_is_saved]


@pytest.mark.parametrize("story", HELD)
def test_a_prefix_that_is_needed_to_its_end_is_no_room(story: Callable[[], Driver]) -> None:
    """Each of its chunks has to stay, not only the last one; so the save is declined for a reason."""
    driver = story()
    press(driver)
    assert [event.reason for event in driver.all_of(e.SaveDeclined)] == ["pool_full"]
    assert driver.audited().violations == []


@pytest.mark.parametrize("story", HELD)
def test_it_is_room_as_soon_as_nobody_needs_it(story: Callable[[], Driver]) -> None:
    """A pool that declined nevertheless would keep it for somebody who will not come for it."""
    driver = story()
    who = driver.all_of(e.RequestArrived)[-1].request_id
    driver.settle_all()
    if story is not before_a_tail_that_is_saved:  # it would free the slot of the tail
        driver.finish(who, 0, 33)
        driver.settle_all()
    press(driver)
    events = driver.events()
    (place,) = (place for place, (_, event) in enumerate(events) if isinstance(event, e.ChunksEvicted))
    sequence, eviction = events[place]
    assert isinstance(eviction, e.ChunksEvicted)
    declined = e.SaveDeclined(eviction.request_id, eviction.ordinal, 0, 0, 1, "pool_full", eviction.cause)
    events[place : place + 2] = [(sequence, declined)]
    (detail,) = (each.detail for each in driver.audited(events).violations if each.rule == "PIN_BALANCE")
    assert detail.endswith("were free, and evicting chunks that no request relies on would have made room")


def test_chunks_of_its_own_that_have_not_settled_are_room() -> None:
    """Somebody else has stored what the request is about to compute; its own beginning is all that it keeps."""
    driver = crowded(2)
    driver.start("writer", (keys_of("new", 1)[0], *STORED), 49, (1, 2, 3, 4))
    events = [*driver.events()]
    step, cause = driver.step(settled=[("writer", 0, 16)]), driver.all_of(e.StepScheduled)[-1]
    assert [type(decision) for decision in step] == [e.ChunksEvicted, e.SaveIssued]
    declined = e.SaveDeclined("writer", driver.record("writer").ordinal, 0, 0, 1, "pool_full", len(events) + 1)
    altered = [*events, (len(events) + 1, cause), (len(events) + 2, declined)]
    assert driver.audited(altered).num_violations["PIN_BALANCE"] == 1
