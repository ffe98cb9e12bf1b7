"""Timelines and summaries as visitors of the reader: nothing of a life is left out, also where the log has a hole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from lifecycle_driver import Driver, play_seed

from kvledger.adapters.tools.logs.requests import Requests, RequestSummary
from kvledger.adapters.tools.logs.timeline import Group, Timelines
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Model, Reader
from kvledger.lifecycle.replay import batches

CORE = Core.standard()
SEEDS = range(3, 9)


def read(
    driver: Driver, request_ids: Sequence[str], gap: tuple[int, int] | None = None
) -> tuple[dict[str, list[Group]], list[RequestSummary]]:
    """Read a walk, without the observations that begin in the gap (first and last sequence number)."""
    model = Model(CORE.tables, driver.configuration)
    timelines, summaries = Timelines(model, CORE, request_ids), list[RequestSummary]()
    reader = Reader(model, [timelines, Requests(model, summaries.append)])
    is_lost = False
    for frame in batches(enumerate(driver.observed, 1)):
        if gap is not None and gap[0] <= frame[0][0] <= gap[1]:
            is_lost = True
            continue
        if is_lost and gap is not None:
            reader.lost(*gap)
            is_lost = False
        reader.take(frame)
    reader.finish()
    return timelines.state.groups, summaries


def walked(seed: int) -> tuple[Driver, list[str]]:
    """A walk with every kind of event, and who arrives in it."""
    driver = play_seed(seed, 80, chunk_size=16, block_size=16)
    arrivals = (event.request_id for event in driver.observed if isinstance(event, e.RequestArrived))
    return driver, list(dict.fromkeys(arrivals))


@pytest.mark.parametrize("seed", SEEDS)
def test_each_group_begins_in_the_state_in_which_the_one_before_ended(seed: int) -> None:
    """From the arrival, before which there is none, to the release."""
    driver, request_ids = walked(seed)
    groups, _ = read(driver, request_ids)
    num_compared = 0
    for of_request in groups.values():
        assert of_request[0].what == "arrived"
        for before, after in pairwise(of_request):
            if after.what == "arrived":
                assert after.state_before is None
            elif before.state_after is not None:
                assert after.state_before == before.state_after
                num_compared += 1
    assert num_compared


@pytest.mark.parametrize("seed", SEEDS)
def test_each_release_is_shown_whatever_led_to_it(seed: int) -> None:
    """Also upon a step, where a copy is given up that no rank has reported."""
    driver, request_ids = walked(seed)
    groups, _ = read(driver, request_ids)
    released = [(at, event) for at, event in enumerate(driver.observed, 1) if isinstance(event, e.RequestReleased)]
    assert released
    for sequence, event in released:
        (group,) = (each for each in groups[event.request_id] if each.first_sequence <= sequence <= each.last_sequence)
        assert group.state_after is None
        assert "released" in group.text


@pytest.mark.parametrize("seed", SEEDS)
def test_behind_a_gap_a_life_is_shown_as_in_the_whole_log_once_its_state_is_known(seed: int) -> None:
    """Of requests that arrive before the gap and live on after it, and of those that arrive in it."""
    driver, request_ids = walked(seed)
    whole, summaries = read(driver, request_ids)
    gap = len(driver.observed) // 4, len(driver.observed) // 2
    partial, partial_summaries = read(driver, request_ids, gap)
    num_equal = 0
    for request_id in request_ids:
        preempted = {group.first_sequence: group for group in whole[request_id] if group.what == "request.preempted"}
        for group in partial[request_id]:
            if group.what == "lost":
                assert (group.first_sequence, group.last_sequence) == gap
            elif group.first_sequence > gap[1] and group.what == "request.preempted":
                assert group.state_after == preempted[group.first_sequence].state_after == "preempted"
                num_equal += 1
    assert num_equal
    outcomes = {summary.ordinal: summary.outcome for summary in summaries}
    finished_later = [each for each in partial_summaries if each.finished_ns is not None]
    assert all(each.outcome == outcomes[each.ordinal] for each in finished_later)


def test_the_list_says_in_which_state_the_log_leaves_a_request_and_with_how_many_tokens() -> None:
    """Decoded tokens count, which no event of the request names."""
    driver = Driver(num_slots=32)
    driver.start("a", (), 20, (1, 2, 3))
    driver.step(("a", 20, 1, 21))
    for _ in range(4):
        driver.step()
    _, (summary,) = read(driver, ["a"])
    assert (summary.outcome, summary.num_tokens, summary.finished_ns) == ("running", 25, None)
