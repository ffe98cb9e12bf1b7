"""The part-filled last chunk of a preempted request: who may load it, and when it is gone."""

from __future__ import annotations

from typing import Any

import pytest
from lifecycle_driver import Driver
from lifecycle_driver.driver import keys_of

from kvledger.lifecycle import events as e


def preempted(**configuration: Any) -> tuple[Driver, e.TailSaveIssued]:
    """A request of two whole chunks of 16 and 5 tokens more, just deprived of its blocks."""
    driver = Driver(**({"chunk_size": 16, "block_size": 16} | configuration))
    driver.start("a", keys_of("a", 37 // driver.configuration.chunk_size), 38, (1, 2, 3))
    decisions = driver.preempt("a", 37)
    (tail,) = [decision for decision in decisions if isinstance(decision, e.TailSaveIssued)]
    return driver, tail


def saved(**configuration: Any) -> tuple[Driver, e.TailSaveIssued]:
    """The same, with every save reported."""
    driver, tail = preempted(**configuration)
    for save in driver.all_of(e.SaveIssued):
        driver.report(save.job_id)
    driver.report(tail.job_id)
    return driver, tail


def test_the_tail_is_copied_out_of_the_block_that_holds_it() -> None:
    """Tokens 32 to 36 lie in the third block."""
    _, tail = preempted()
    assert (tail.first_token, tail.num_tokens, tail.block_ids) == (32, 5, (3,))
    assert tail.generation == 0, "the blocks belong to the life before"


def test_the_answer_reaches_to_the_end_of_the_tail() -> None:
    """Two chunks and the tail, 37 of 38 tokens; nothing is left but the one whose logits are wanted."""
    driver, _ = saved()
    answer = driver.lookup("a", 0, 38)
    assert (answer.num_hit_tokens, answer.num_external_tokens, answer.miss_reason) == (37, 37, "complete")


def test_the_load_takes_its_last_page_from_the_tail() -> None:
    """Pages of whole chunks first, then the image that only this request has."""
    driver, tail = saved()
    driver.lookup("a", 0, 38)
    driver.allocate("a", (7, 8, 9), 37)
    (load,) = driver.all_of(e.LoadIssued)
    assert load.block_ids == (7, 8, 9)
    assert load.slots[-1:] == tail.slots


def test_a_tail_that_is_not_saved_yet_is_not_offered() -> None:
    """Until its copy is reported, only whole chunks count."""
    driver, tail = preempted()
    for save in driver.all_of(e.SaveIssued):
        driver.report(save.job_id)
    assert driver.lookup("a", 0, 38).num_hit_tokens == 32
    driver.report(tail.job_id)
    assert driver.lookup("a", 0, 38).num_hit_tokens == 37


def test_a_tail_behind_a_missing_chunk_is_worth_nothing() -> None:
    """A prefix has no holes."""
    driver, tail = preempted()
    for save in driver.all_of(e.SaveIssued):
        driver.report(save.job_id, ok=False)
    driver.report(tail.job_id)
    answer = driver.lookup("a", 0, 38)
    assert answer.num_hit_tokens % 16 == 0
    assert answer.num_external_tokens == answer.num_hit_tokens


def test_whole_chunks_of_others_go_before_the_tail() -> None:
    """Where somebody has saved the whole chunk meanwhile, the tail is not needed and not mixed in."""
    driver, tail = preempted()
    for save in driver.all_of(e.SaveIssued):
        driver.report(save.job_id)
    driver.report(tail.job_id)
    driver.keys("a", 0, keys_of("a", 3))
    driver.save_prefix("twin", keys_of("a", 3))
    assert driver.lookup("a", 0, 50).num_hit_tokens == 48
    driver.allocate("a", (7, 8, 9, 10), 48)
    (load,) = driver.all_of(e.LoadIssued)
    assert not set(load.slots) & set(tail.slots)


@pytest.mark.parametrize("end", ["runs again", "finishes", "reset", "preempted again"])
def test_the_tail_is_dropped_when_it_has_no_more_use(end: str) -> None:
    """Its slots are free again, and nobody is offered it."""
    driver, tail = saved()
    slots = driver.projections.slots
    num_free = slots.num_free
    if end == "runs again":
        driver.lookup("a", 0, 38)
        driver.allocate("a", (7, 8, 9), 0)
        driver.step(("a", 0, 38, 38))
    elif end == "finishes":
        driver.finish("a", 0, 38)
    elif end == "reset":
        driver.reset()
    else:
        driver.lookup("a", 0, 38)
        driver.allocate("a", (7, 8, 9), 0)
        driver.preempt("a", 0)
    record = driver.projections.tracker.of(0)
    assert record is None or record.tail is None or not record.tail.is_saved
    assert slots.num_references(tail.slots[0]) == 0
    assert slots.num_free > num_free


def test_without_room_the_tail_is_declined_and_said_so() -> None:
    """Its own chunks are never evicted for it."""
    driver = Driver(chunk_size=16, block_size=16, num_slots=2)
    driver.start("a", keys_of("a", 2), 38, (1, 2, 3))
    decisions = driver.preempt("a", 37)
    assert [type(decision) for decision in decisions] == [e.SaveIssued, e.SaveDeclined]


def test_a_tail_inside_a_block_is_an_image_of_the_whole_block() -> None:
    """Chunks of 8 on blocks of 16: the page holds the chunk before the tail as well."""
    _, tail = saved(chunk_size=8, block_size=16)
    assert (tail.first_token, tail.num_tokens, tail.block_ids) == (32, 5, (3,))


def test_tails_can_be_turned_off() -> None:
    """Then only whole chunks come back."""
    driver = Driver(chunk_size=16, block_size=16, save_tails=False)
    driver.start("a", keys_of("a", 2), 38, (1, 2, 3))
    driver.preempt("a", 37)
    assert driver.all_of(e.TailSaveIssued) == []
