"""What vLLM is owed, from decisions alone: one end of each load beside the steps, one of each delayed free."""

from __future__ import annotations

from typing import Any

import pytest

from kvledger.adapters.vllm.deliveries import Deliveries
from kvledger.adapters.vllm.metadata import JobReport
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


def deliveries_after(*decisions: e.Event, num_ranks: int = 1) -> Deliveries:
    """After these decisions."""
    deliveries = Deliveries(num_ranks)
    for decision in decisions:
        deliveries.take_up(decision)
    return deliveries


def answered(*, is_async: bool) -> e.LookupAnswered:
    """The scheduler was promised 16 tokens."""
    return e.LookupAnswered("a", 0, 0, 0, 17, 16, 16, is_async, "complete", 0, 1)


def load(job_id: int = 1, *, is_async: bool = True, request_id: str = "a") -> e.LoadIssued:
    """One page comes in."""
    return e.LoadIssued(request_id, 0, 0, job_id, 0, 16, (0,), (1,), is_async, 1)


def save(job_id: int, *, is_async: bool = True, request_id: str = "a") -> e.SaveIssued:
    """One page goes out."""
    return e.SaveIssued(request_id, 0, 0, job_id, (0,), (0,), (1,), not is_async, is_async, 1)


def report(job_id: int, rank: int = 0, *, done: bool = True) -> JobReport:
    """The word of one rank."""
    return JobReport(job_id, rank, done=done, num_bytes=1, duration_ns=1)


HELD = e.BlocksHeld("a", 0, 0, 1)
RELEASED = e.RequestReleased("a", 0, 0, 1)
LOADED = e.LoadCompleted("a", 0, 0, 1, 1)
LOAD_FAILED = e.LoadFailed("a", 0, 0, 1, "it broke", 1)


def told(deliveries: Deliveries) -> tuple[list[str], tuple[str, ...], tuple[str, ...]]:
    """(received, failed, sent), taken."""
    return deliveries.take_received(), deliveries.take_failed(), deliveries.take_sent()


NOTHING: Any = ([], (), ())


def test_a_load_that_came_through_is_told_once() -> None:
    """What was taken is not there any more."""
    deliveries = deliveries_after(load())
    assert not deliveries.is_owing
    deliveries.take_up(LOADED)
    assert deliveries.is_owing
    assert told(deliveries) == (["a"], (), ())
    assert told(deliveries) == NOTHING
    assert not deliveries.is_owing


def test_a_load_that_failed_is_told_once_and_as_nothing_else() -> None:
    """VLLM counts a failed load among the received ones by itself."""
    deliveries = deliveries_after(load(), LOAD_FAILED)
    assert told(deliveries) == ([], ("a",), ())
    assert told(deliveries) == NOTHING


def test_copies_within_a_step_are_nothing_to_tell() -> None:
    """VLLM waits for the step, not for them."""
    deliveries = deliveries_after(load(is_async=False), save(2, is_async=False), LOADED, LOAD_FAILED)
    assert told(deliveries) == NOTHING


def test_an_end_of_an_unknown_job_is_nothing_to_tell() -> None:
    """Settled twice, or of an earlier life of the log."""
    deliveries = deliveries_after(load(), LOADED)
    told(deliveries)
    deliveries.take_up(LOADED)
    deliveries.take_up(LOAD_FAILED)
    assert told(deliveries) == NOTHING


def test_blocks_are_held_until_nobody_copies_out_of_them() -> None:
    """Told once; that the request is released a moment later tells nothing more."""
    deliveries = deliveries_after(save(1), HELD)
    assert deliveries.hold("a")
    assert told(deliveries) == NOTHING
    deliveries.take_up(e.SaveCompleted("a", 0, 0, 1, 1))
    assert told(deliveries) == ([], (), ("a",))
    deliveries.take_up(RELEASED)
    assert told(deliveries) == NOTHING


def test_nobody_is_told_of_blocks_that_vllm_was_not_asked_to_keep() -> None:
    """Whatever was decided after the request's end was answered."""
    deliveries = deliveries_after(save(1))
    assert not deliveries.hold("a")
    deliveries.take_up(HELD)
    deliveries.take_up(RELEASED)
    assert told(deliveries) == NOTHING


def test_a_request_that_holds_nothing_is_released_in_silence() -> None:
    """VLLM freed its blocks at its end."""
    assert told(deliveries_after(RELEASED)) == NOTHING


@pytest.mark.parametrize("end", [LOADED, LOAD_FAILED])
def test_blocks_that_vllm_keeps_for_a_load_are_not_held_as_well(end: e.Event) -> None:
    """It frees them at the end of the load; another word for the same blocks would kill the engine."""
    deliveries = deliveries_after(load(), save(2), HELD)
    assert not deliveries.hold("a")
    deliveries.take_up(end)
    deliveries.take_up(RELEASED)
    received, failed, sent = told(deliveries)
    assert ([*received, *failed], sent) == (["a"], ())


def test_after_vllm_has_heard_of_the_load_blocks_can_be_held() -> None:
    """It would free them at once now."""
    deliveries = deliveries_after(load(), LOADED)
    deliveries.heard(deliveries.take_received(), ())
    deliveries.take_up(save(2))
    deliveries.take_up(HELD)
    assert deliveries.hold("a")


def test_a_promise_beside_the_steps_that_cannot_be_kept_is_told_as_failed() -> None:
    """Once; a second refusal is of something else."""
    deliveries = deliveries_after(answered(is_async=True))
    assert deliveries.refuse("a")
    assert told(deliveries) == ([], ("a",), ())
    assert not deliveries.refuse("a")


@pytest.mark.parametrize(
    "decisions",
    [(), (answered(is_async=False),), (answered(is_async=True), answered(is_async=False))],
    ids=["no promise", "a synchronous one", "replaced by a synchronous one"],
)
def test_a_promise_within_the_step_is_not_refused_here(decisions: tuple[e.Event, ...]) -> None:
    """Its blocks are reported as load errors instead."""
    deliveries = deliveries_after(*decisions)
    assert not deliveries.refuse("a")
    assert told(deliveries) == NOTHING


def test_what_the_ledger_decides_is_not_told_again_from_counts() -> None:
    """Reports are counted beside it, and nothing follows from the count."""
    deliveries = deliveries_after(load())
    deliveries.count([report(1)])
    assert told(deliveries) == NOTHING
    deliveries.take_up(LOADED)
    assert told(deliveries) == (["a"], (), ())
    deliveries.settle_counted()
    assert told(deliveries) == NOTHING


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_without_the_ledger_a_load_ends_when_every_rank_has_reported(num_ranks: int) -> None:
    """Each rank once; a doubled report does not stand for another rank."""
    deliveries = deliveries_after(load(), num_ranks=num_ranks)
    for rank in range(num_ranks - 1):
        deliveries.count([report(1, rank), report(1, rank)])
        deliveries.settle_counted()
        assert told(deliveries) == NOTHING
    deliveries.count([report(1, num_ranks - 1)])
    deliveries.settle_counted()
    assert told(deliveries) == (["a"], (), ())
    deliveries.take_up(LOADED)
    assert told(deliveries) == NOTHING, "the ledger comes to it later"


def test_without_the_ledger_one_failed_rank_fails_a_load() -> None:
    """As with it."""
    deliveries = deliveries_after(load(), num_ranks=2)
    deliveries.count([report(1, 0, done=False), report(1, 1)])
    deliveries.settle_counted()
    assert told(deliveries) == ([], ("a",), ())


def test_without_the_ledger_blocks_are_freed_after_the_last_copy_out_of_them() -> None:
    """Both saves must have ended; then it is told once, also if the ledger says so again."""
    deliveries = deliveries_after(save(1), save(2), HELD, num_ranks=2)
    assert deliveries.hold("a")
    deliveries.count([report(1, 0), report(1, 1), report(2, 0)])
    deliveries.settle_counted()
    assert told(deliveries) == NOTHING
    deliveries.count([report(2, 1, done=False)])
    deliveries.settle_counted()
    assert told(deliveries) == ([], (), ("a",))
    deliveries.take_up(RELEASED)
    assert told(deliveries) == NOTHING


def test_a_report_of_a_foreign_job_or_rank_settles_nothing() -> None:
    """Whoever sent it."""
    deliveries = deliveries_after(load())
    deliveries.count([report(9), report(1, 7)])
    deliveries.settle_counted()
    assert told(deliveries) == NOTHING


def test_an_id_used_again_is_owed_its_own_ends() -> None:
    """The first life is through; the second load is told of as well."""
    deliveries = deliveries_after(load(1), LOADED)
    deliveries.heard(deliveries.take_received(), ())
    deliveries.take_up(RELEASED)
    deliveries.take_up(load(2))
    deliveries.take_up(e.LoadCompleted("a", 0, 0, 2, 1))
    assert told(deliveries) == (["a"], (), ())
