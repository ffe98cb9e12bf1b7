"""How far a request's chunks have been dealt with; the cursor never passes what is settled."""

from __future__ import annotations

import pytest
from lifecycle_driver import Driver, keys_of
from lifecycle_driver.invariants import num_entries

from kvledger.lifecycle import events as e


def saved(num_chunks: int = 3) -> Driver:
    """A running request of 65 tokens, chunks of 16, with some of them dealt with."""
    driver = Driver(chunk_size=16)
    driver.start("a", keys_of("a", 4), 65, range(5))
    driver.step(settled=[("a", 0, num_chunks * 16 + 5)])
    driver.settle_all()
    return driver


def cursor(driver: Driver) -> int:
    """Chunks dealt with."""
    num_chunks: int = driver.record("a").num_chunks_handled
    return num_chunks


def next_threshold(driver: Driver) -> int:
    """The number of settled tokens from which there is something to save."""
    record = driver.record("a")
    tokens: int = driver.projections.tracker.save_threshold(record, record.num_chunks_handled)
    return tokens


def test_the_cursor_counts_whole_settled_chunks() -> None:
    """And the next threshold is the end of the one that follows."""
    driver = saved(3)
    assert cursor(driver) == 3
    assert next_threshold(driver) == 64


def test_a_request_nobody_told_about_starts_at_its_first_chunk() -> None:
    """No entry is needed for that."""
    driver = Driver(chunk_size=16)
    driver.arrive("a", 65)
    assert next_threshold(driver) == 16
    assert driver.record("a").num_chunks_handled == 0


@pytest.mark.parametrize(
    ("interval", "num_prompt_tokens", "num_chunks", "threshold"),
    [
        pytest.param(0, 65, 4, 80, id="without an interval each chunk counts"),
        pytest.param(48, 65, 2, 48, id="a chunk of the prompt counts for itself"),
        pytest.param(48, 65, 4, 96, id="behind the prompt a whole interval"),
        pytest.param(48, 65, 6, 144, id="and behind that the next"),
        pytest.param(48, 10, 0, 48, id="also where the prompt has no whole chunk"),
        pytest.param(40, 10, 0, 48, id="in whole chunks, of no fewer tokens"),
    ],
)
def test_a_prompt_is_saved_as_it_settles_and_what_is_decoded_by_intervals(
    interval: int, num_prompt_tokens: int, num_chunks: int, threshold: int
) -> None:
    """Of a request with so many chunks dealt with."""
    driver = Driver(chunk_size=16, save_interval_tokens=interval)
    driver.arrive("a", num_prompt_tokens)
    assert driver.projections.tracker.save_threshold(driver.record("a"), num_chunks) == threshold


def test_the_next_turn_of_a_session_saves_the_outputs_before_it_at_once() -> None:
    """They are part of its prompt."""
    driver = Driver(chunk_size=16, save_interval_tokens=64)
    driver.start("a", keys_of("a", 1), 17, range(5))
    driver.step(("a", 17, 1, 18), settled=[("a", 0, 17)])
    assert next_threshold(driver) == 64
    driver.continue_session("a", 40, 60)
    assert next_threshold(driver) == 32


@pytest.mark.parametrize("event", ["preempted", "finished", "reset", "load failed", "arrived again"])
def test_the_cursor_starts_again_where_what_lies_below_may_be_gone(event: str) -> None:
    """Chunks that are still there cost nothing when they are met again."""
    driver = saved()
    if event == "preempted":
        driver.preempt("a", 64)
    elif event == "finished":
        driver.finish("a", 64, 66)
    elif event == "reset":
        driver.reset()
    elif event == "load failed":
        driver.observe(e.LoadFailed("a", 0, 0, 99, "it broke", 1))
    else:
        driver.arrive("a", 65)
    assert cursor(driver) == 0


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (15, 0), (16, 1), (40, 2), (65, 3)])
def test_a_rollback_and_a_new_turn_cut_the_cursor(num_tokens: int, expected: int) -> None:
    """To the whole chunks that are left, never forwards."""
    rolled_back, continued = saved(), saved()
    rolled_back.roll_back("a", num_tokens)
    continued.continue_session("a", num_tokens, 80)
    assert (cursor(rolled_back), cursor(continued)) == (expected, expected)


def test_the_cursor_stands_still_while_a_load_is_in_flight() -> None:
    """Nothing is saved then, so nothing has been dealt with."""
    driver = Driver(chunk_size=16)
    driver.save_prefix("earlier", keys_of("a", 2))
    driver.arrive("a", 65, keys_of("a", 4))
    driver.lookup("a", 0, 65)
    driver.allocate("a", range(5), 32)
    driver.step(("a", 32, 33, 65), settled=[("a", 0, 32)])
    assert cursor(driver) == 0


def test_after_a_new_turn_the_changed_chunks_are_saved_again() -> None:
    """From the cut on, under their new keys."""
    driver = saved()
    driver.continue_session("a", 40, 80)
    driver.keys("a", 2, keys_of("turn two", 3))
    driver.step(("a", 40, 40, 80))
    driver.step(settled=[("a", cursor(driver), 80)])
    assert driver.all_of(e.SaveIssued)[-1].chunks == (2, 3, 4)


def test_a_report_about_a_finished_request_leaves_no_entry_behind() -> None:
    """A step may still tell what settled of a request that has just ended."""
    driver = saved()
    driver.finish("a", 64, 66)
    driver.step(settled=[("a", 0, 64)])
    driver.settle_all()
    assert not any(num_entries(driver.projections).values())
