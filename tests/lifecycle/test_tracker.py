"""The request tracker: states, generations and token counts, folded."""

from __future__ import annotations

from typing import get_type_hints

import msgspec
import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import Core, RequestState
from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.base import NO_SUBJECT


def count(driver: Driver, request_id: str) -> int:
    """Computed tokens as the tracker counts them."""
    counted: int = driver.projections.tracker.num_computed_tokens(driver.record(request_id))
    return counted


def decoding(*names: str) -> Driver:
    """Requests that have decoded one token after a prompt of 20."""
    driver = Driver()
    for index, name in enumerate(names):
        driver.start(name, keys_of(name, 2), 20, (2 * index, 2 * index + 1))
    driver.step(*((name, 20, 1, 21) for name in names))
    return driver


def test_an_arrived_request_is_new_with_nothing_computed() -> None:
    """Its prompt is what is known."""
    driver = Driver()
    driver.arrive("a", 33)
    record = driver.record("a")
    assert (record.state, record.num_tokens, record.num_prompt_tokens, record.generation) == ("new", 33, 33, 0)
    assert count(driver, "a") == 0


def test_a_steady_request_counts_on_without_being_named() -> None:
    """A step in which everybody decodes one token names nobody."""
    driver = decoding("a", "b")
    for _ in range(7):
        driver.step(num_scheduled_tokens=2)
    assert (count(driver, "a"), count(driver, "b")) == (28, 28)


def test_a_paused_request_does_not_count() -> None:
    """It is named once, when it stops, and again when it goes on."""
    driver = decoding("a", "b")
    driver.step(num_scheduled_tokens=2)
    driver.step(paused=["a"], num_scheduled_tokens=1)
    driver.step(num_scheduled_tokens=1)
    assert (count(driver, "a"), count(driver, "b")) == (22, 24)
    driver.step(("a", 22, 1, 23))
    driver.step(num_scheduled_tokens=2)
    assert (count(driver, "a"), count(driver, "b")) == (24, 26)


def test_a_request_that_verifies_drafts_is_counted_by_what_is_told() -> None:
    """More than one token a step is not steady."""
    driver = decoding("a")
    driver.step(("a", 21, 4, 25))
    driver.step()
    assert count(driver, "a") == 25


def test_a_last_chunk_of_one_token_is_steady_only_if_it_is_the_last() -> None:
    """One token in the middle of a prefill does not make a decoding request."""
    driver = Driver()
    driver.arrive("a", 20)
    driver.lookup("a", 0, 20)
    driver.allocate("a", (1, 2))
    driver.step(("a", 0, 1, 20))
    driver.step()
    assert count(driver, "a") == 1


def test_a_preemption_takes_the_count_and_begins_a_generation() -> None:
    """What had settled is remembered as what can be lost."""
    driver = decoding("a")
    driver.preempt("a", 20)
    record = driver.record("a")
    assert (record.state, record.generation, record.num_preemptions) == (RequestState.PREEMPTED, 1, 1)
    assert record.num_tokens_before_preemption == 20
    driver.step()
    assert count(driver, "a") == 0


@pytest.mark.parametrize(("num_tokens", "generation"), [(0, 1), (16, 0)])
def test_a_rollback_begins_a_generation_only_if_nothing_is_left(num_tokens: int, generation: int) -> None:
    """Known tokens are to be computed again, so it is a prefill again."""
    driver = decoding("a")
    driver.roll_back("a", num_tokens)
    record = driver.record("a")
    assert (record.state, record.generation) == (RequestState.CHUNKED_PREFILL, generation)
    driver.step()
    assert count(driver, "a") == num_tokens


def test_a_session_continues_in_a_new_generation_with_the_tokens_it_is_told() -> None:
    """Blocks and computed tokens are kept, the rest is to come."""
    driver = decoding("a")
    driver.continue_session("a", 21, 40)
    record = driver.record("a")
    assert (record.state, record.generation) == (RequestState.CHUNKED_PREFILL, 1)
    assert (record.num_tokens, record.num_prompt_tokens, count(driver, "a")) == (40, 40, 21)


def test_a_finished_request_counts_no_further() -> None:
    """It may stay for its transfers while others decode."""
    driver = decoding("a")
    driver.finish("a", 16, 22)
    driver.step()
    driver.step()
    assert count(driver, "a") == 21


def test_the_time_of_a_state_is_that_of_the_observation_that_led_to_it() -> None:
    """No clock is read: time comes with events."""
    driver = Driver()
    driver.start("a", keys_of("a", 1), 9, (1,))
    since = driver.record("a").state_since_ns
    assert since == driver.all_of(e.StepScheduled)[-1].time_ns
    driver.step(("a", 9, 1, 10))
    assert driver.record("a").state_since_ns == since


@pytest.mark.parametrize(
    "event_class", [each for each in Core.standard().observations if "time_ns" in e.field_names(each)]
)
def test_every_observation_that_has_a_time_is_the_time_of_what_it_moves(event_class: type[e.Event]) -> None:
    """`replay` gave a request that an observed block table had moved the time of an older event."""
    tracker = Driver().projections.tracker
    event = event_class(**{**example_values(event_class), "time_ns": 77})
    tracker.folds()[event_class](event, 1, NO_SUBJECT)
    assert tracker.time_ns == 77


def test_a_request_that_was_preempted_or_rolled_back_knows_all_of_its_tokens() -> None:
    """A preemption has the number; a rollback takes no token away, and has none."""
    driver = decoding("a", "b")
    driver.step()
    driver.preempt("a", 20, 23)
    driver.roll_back("b", 16)
    assert (driver.record("a").num_tokens, driver.record("b").num_tokens) == (23, 22)


def test_a_decision_about_an_earlier_life_does_not_move_this_one() -> None:
    """Generations tell them apart; a release of generation 0 leaves generation 1."""
    driver = decoding("a")
    driver.preempt("a", 20)
    tracker = driver.projections.tracker
    driver.projections.fold(e.RequestReleased("a", 0, 0, 1), 99)
    assert tracker.get("a") is not None
    driver.projections.fold(e.RequestReleased("a", 0, 1, 1), 99)
    assert tracker.get("a") is None


def test_an_ordinal_names_one_life_of_an_id() -> None:
    """The id is used again; the old ordinal finds nobody."""
    driver = Driver()
    driver.arrive("a", 5)
    driver.finish("a", 0, 5)
    driver.arrive("a", 6)
    assert driver.projections.tracker.of(0) is None
    assert driver.projections.tracker.of(1) is driver.record("a")


def test_events_of_unknown_requests_leave_no_trace() -> None:
    """Folding is total: whatever was recorded can be folded."""
    tracker = Driver().projections.tracker
    before = msgspec.msgpack.encode(tracker.state)
    for event_class, fold in tracker.folds().items():
        if event_class in Core.standard().tables.request_events and event_class is not e.RequestArrived:
            fold(event_class(**example_values(event_class)), 1, NO_SUBJECT)
    tracker.folds()[e.StepScheduled](
        e.StepScheduled(0, 1, ((9, 0, 1, 1),), (9,), ((9, (1,)),), (e.SettledTokens(9, 0, 1),), 5), 1, NO_SUBJECT
    )
    tracker.state.computed.num_steps = tracker.state.time_ns = tracker.unfilled.num_failures = 0
    assert msgspec.msgpack.encode(tracker.state) == before


def example_values(event_class: type[e.Event]) -> dict[str, object]:
    """Plain values for every field."""
    values: dict[object, object] = {
        int: 1,
        str: "ghost",
        bool: True,
        bytes: b"",
        tuple[int, ...]: (),
        tuple[bytes, ...]: (),
    }
    hints = get_type_hints(event_class)
    return {name: values.get(hints[name], ()) for name in e.field_names(event_class)}
