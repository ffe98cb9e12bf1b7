"""What is owed outside: each job once to the workers, one end of each asynchronous load and of each delayed free."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvledger.lifecycle import Channel, Core, effects_delivered
from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.copies import NOTHING_OWED, Ready
from kvledger.lifecycle.projections.owed import Owed


class OwedByLog:
    """The projection, and its folds in the order of a log."""

    def __init__(self, *events: e.Event, num_ranks: int = 1) -> None:
        self.projection = Owed(Core.standard().tables, num_ranks)
        self._folds = self.projection.folds()
        self._sequence = 0
        self.fold(e.RequestArrived("a", 0, 16, 1), *events)

    def fold(self, *events: e.Event) -> None:
        """Take up the next events of the log."""
        for event in events:
            self._sequence += 1
            fold = self._folds.get(type(event))
            if fold is not None:
                fold(event, self._sequence)

    def taken(self, channel: Channel, reported: tuple[int, ...] = ()) -> Ready:
        """What is ready, handed over."""
        ready = msgspec.structs.replace(self.projection.ready(channel), reported=reported)
        delivered = effects_delivered(ready)
        if delivered is not None:
            self.fold(delivered)
        return ready

    def ends(self) -> tuple[list[str], list[str], list[str]]:
        """(received, failed, sent), handed over."""
        workers, vllm = self.taken(Channel.WORKERS), self.taken(Channel.VLLM)
        return list(vllm.received.values()), list(workers.failed.values()), list(workers.sent.values())

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is remembered but lives and answers."""
        its = self.projection
        return not (its.is_owing or its.is_waiting or its.is_freeing or its.state.to_report or its.state.block_ids)


NO_END: Any = ([], [], [])


def answered(*, is_async: bool = True, ordinal: int = 0) -> e.LookupAnswered:
    """The scheduler was promised 16 tokens."""
    return e.LookupAnswered("a", ordinal, 0, 0, 17, 16, 16, is_async, "complete", 1)


def allocated(num_external_tokens: int = 16) -> e.BlocksAllocated:
    """It takes the answer up."""
    return e.BlocksAllocated("a", (1, 2), num_external_tokens, 1)


def load(job_id: int = 1, *, is_async: bool = True, ordinal: int = 0) -> e.LoadIssued:
    """One page comes in."""
    return e.LoadIssued("a", ordinal, 0, job_id, 0, 16, (0,), (1,), is_async, 1)


def save(job_id: int, *, is_async: bool = True, before_forward: bool = False) -> e.SaveIssued:
    """One page goes out."""
    return e.SaveIssued("a", 0, 0, job_id, (0,), (0,), (1,), before_forward, is_async, 1)


def report(job_id: int, *ranks: int, error: str = "") -> e.TransferReported:
    """These ranks report; the first where none is named."""
    return e.TransferReported.by(ranks or (0,), job_id, 1, error=error)


def withheld(job_id: int, why: e.Withheld = e.Withheld.UNWRITTEN) -> e.TransferReported:
    """The connector reports in their place."""
    return e.TransferReported((job_id,), (), (0,), False, (0,), 0, "no", why, 1)


FINISHED = e.RequestFinished("a", "FINISHED_STOPPED", 16, 17, 1)
HELD = e.BlocksHeld("a", 0, 0, 1)
LOADING = (answered(), allocated(), load())


# --- jobs ------------------------------------------------------------------------------------------


def test_a_job_is_handed_out_once() -> None:
    """In the order in which they were issued; what is not advanced is still owed."""
    tail = e.TailSaveIssued("a", 0, 0, 2, 16, 3, (1,), (2,), 1)
    owed = OwedByLog(save(1, is_async=False), tail)
    ready = owed.projection.ready(Channel.WORKERS)
    assert [job.job_id for job in ready.jobs] == [1, 2]
    assert owed.projection.ready(Channel.WORKERS) == ready
    assert owed.taken(Channel.WORKERS) == ready
    assert owed.taken(Channel.WORKERS) == NOTHING_OWED


def test_where_nothing_is_owed_nothing_is_recorded() -> None:
    """So a steady step costs the log nothing."""
    owed = OwedByLog(save(1, is_async=False))
    owed.taken(Channel.WORKERS)
    assert owed.projection.ready(Channel.WORKERS) == NOTHING_OWED
    assert owed.projection.ready(Channel.VLLM) == NOTHING_OWED


def test_a_reminder_is_handed_out_once() -> None:
    """Of two the one that a step waits for."""
    fence, ask = e.TransferAwaited("a", 0, 0, 1, True, 1), e.TransferAwaited("a", 0, 0, 1, False, 1)
    owed = OwedByLog(save(1))
    owed.taken(Channel.WORKERS)
    owed.fold(ask, fence, ask)
    assert owed.taken(Channel.WORKERS).awaited == (fence,)
    assert owed.taken(Channel.WORKERS) == NOTHING_OWED


@pytest.mark.parametrize("why", e.Withheld)
@pytest.mark.parametrize("job", [load(), save(1), save(1, is_async=False)])
def test_a_job_that_is_withheld_is_never_handed_out(job: e.LoadIssued | e.SaveIssued, why: e.Withheld) -> None:
    """Whatever the reason."""
    owed = OwedByLog(answered(is_async=False), allocated(), job, withheld(1, why))
    assert owed.taken(Channel.WORKERS).jobs == ()


def test_what_a_step_went_without_is_late_and_never_handed_out() -> None:
    """The hook that was to hand it out failed; what comes behind goes out with its own step."""
    owed = OwedByLog(
        save(1, is_async=False), e.HookFailed("build_connector_meta", "", "no", 1), save(2, is_async=False)
    )
    ready = owed.projection.ready(Channel.WORKERS)
    assert ([job.job_id for job in ready.late], [job.job_id for job in ready.jobs]) == ([1], [2])
    owed.fold(withheld(1, e.Withheld.HOOK_FAILED))
    assert owed.taken(Channel.WORKERS).late == ()


@pytest.mark.parametrize("failed", [withheld(1), e.LoadFailed("a", 0, 0, 1, "no", 1)])
def test_blocks_of_a_load_that_never_was_are_told_as_not_filled(failed: e.Event) -> None:
    """VLLM counts on them; once."""
    owed = OwedByLog(answered(is_async=False), allocated(), load(is_async=False), failed)
    assert owed.taken(Channel.WORKERS).block_ids == (1,)
    assert owed.taken(Channel.WORKERS) == NOTHING_OWED
    assert owed.is_at_rest


def test_a_refused_load_within_the_step_names_its_blocks() -> None:
    """There is no job that could."""
    owed = OwedByLog(answered(is_async=False), allocated(), e.LoadRefused("a", (7, 8), 1))
    assert owed.taken(Channel.WORKERS).block_ids == (7, 8)
    assert owed.ends() == NO_END


# --- ends of loads ---------------------------------------------------------------------------------


def test_a_load_that_came_through_is_told_once() -> None:
    """To vLLM itself, which has it with that."""
    owed = OwedByLog(*LOADING, report(1), e.LoadCompleted("a", 0, 0, 1, 1))
    assert owed.ends() == (["a"], [], [])
    assert owed.ends() == NO_END
    assert owed.is_at_rest


@pytest.mark.parametrize("failed", [report(1, error="no"), withheld(1), e.LoadFailed("a", 0, 0, 1, "silent", 1)])
def test_a_load_that_failed_is_told_once(failed: e.Event) -> None:
    """Every worker tells; the request waits until vLLM has it."""
    owed = OwedByLog(*LOADING, failed, e.LoadFailed("a", 0, 0, 1, "no", 1), report(1))
    assert owed.ends() == ([], ["a"], [])
    assert owed.ends() == NO_END
    assert owed.projection.is_waiting
    assert owed.projection.reported_to_vllm({"b"}) == ()
    owed.taken(Channel.VLLM, reported=owed.projection.reported_to_vllm({"a"}))
    assert owed.is_at_rest


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_end_is_when_every_rank_has_spoken(num_ranks: int) -> None:
    """A rank that speaks twice does not stand for another; one failure fails it for all; strangers do not count."""
    owed = OwedByLog(*LOADING, report(1, 7), num_ranks=num_ranks)
    for rank in range(num_ranks - 1):
        owed.fold(report(1, rank, error="no" if rank == 0 else ""), report(1, rank))
        assert owed.ends() == NO_END
    owed.fold(report(1, num_ranks - 1))
    assert owed.ends() == ([], ["a"], [])


def test_nobody_is_told_of_a_load_for_which_nobody_waits() -> None:
    """Within the step, not taken up, or not promised as asynchronous."""
    for events in (
        (answered(is_async=False), allocated(), load(is_async=False)),
        (answered(is_async=False), allocated(), load()),
        (answered(), allocated(0), load()),
    ):
        owed = OwedByLog(*events, report(1))
        assert owed.ends() == NO_END


@pytest.mark.parametrize("is_allocation_recorded", [True, False])
def test_a_promised_load_that_is_refused_ends_as_failed(*, is_allocation_recorded: bool) -> None:
    """Also where the hook failed before anything was recorded."""
    refused = e.LoadRefused("a", (7,), 1)
    owed = OwedByLog(answered(), *([allocated()] if is_allocation_recorded else []), refused, refused)
    ready = owed.taken(Channel.WORKERS)
    assert (list(ready.failed), ready.block_ids) == ([0], ())
    assert owed.ends() == NO_END


def test_a_recorded_load_that_is_refused_has_one_end() -> None:
    """Its job was withheld, and the load refused behind it."""
    owed = OwedByLog(*LOADING, withheld(1, e.Withheld.CONTRACT), e.LoadRefused("a", (7,), 1))
    assert owed.ends() == ([], ["a"], [])
    assert owed.ends() == NO_END


# --- delayed frees ---------------------------------------------------------------------------------


@pytest.mark.parametrize("events", [(save(1), FINISHED), (FINISHED, save(1), HELD)])
def test_blocks_are_held_while_a_copy_reads_them(events: tuple[e.Event, ...]) -> None:
    """Also where nothing is decided any more; told when every copy has ended."""
    owed = OwedByLog(save(5), *events)
    assert owed.projection.is_held(0)
    owed.fold(report(1))
    assert owed.ends() == NO_END
    owed.fold(report(5, error="no"))
    assert owed.ends() == ([], [], ["a"])
    assert owed.projection.is_freeing
    owed.taken(Channel.VLLM, reported=owed.projection.reported_to_vllm({"a"}))
    assert owed.is_at_rest


FENCE = e.TransferAwaited("a", 0, 0, 1, True, 1)


@pytest.mark.parametrize(
    "events", [(FINISHED,), (FINISHED, HELD), (save(1), report(1), FINISHED), (save(1), FENCE, FINISHED, HELD)]
)
def test_blocks_that_nobody_reads_are_not_held(events: tuple[e.Event, ...]) -> None:
    """Whatever was decided."""
    owed = OwedByLog(*events)
    assert not owed.projection.is_held(0)
    assert owed.ends() == NO_END


def test_a_copy_that_is_withheld_in_the_hook_that_held_for_it_ends_all_the_same() -> None:
    """The answer stands: vLLM keeps the blocks, and hears that they are free."""
    owed = OwedByLog(FINISHED, save(1), HELD, withheld(1))
    assert owed.projection.is_held(0)
    assert owed.ends() == ([], [], ["a"])


def test_a_request_that_ends_while_it_loads_has_one_end() -> None:
    """VLLM keeps its blocks until the load has ended, and hears of that alone."""
    owed = OwedByLog(*LOADING, save(2), FINISHED, HELD)
    assert not owed.projection.is_held(0)
    assert owed.projection.is_freeing
    owed.fold(report(2), report(1))
    assert owed.ends() == (["a"], [], [])
    assert owed.is_at_rest


def test_what_is_owed_to_a_life_stays_when_its_id_is_taken() -> None:
    """The next life owes nothing for it."""
    owed = OwedByLog(save(1), FINISHED, e.RequestArrived("a", 1, 16, 1))
    assert (owed.projection.is_held(0), owed.projection.is_held(1)) == (True, False)
    owed.fold(report(1))
    assert list(owed.projection.ready(Channel.WORKERS).sent) == [0]


def test_nothing_is_remembered_of_a_promise_to_a_life_that_was_displaced() -> None:
    """It neither ended nor took its answer up, and never will; the next life was promised nothing."""
    owed = OwedByLog(answered(), e.RequestArrived("a", 1, 16, 1))
    assert owed.projection.state.ends == {}
    owed.fold(allocated())
    assert not owed.projection.is_waiting
