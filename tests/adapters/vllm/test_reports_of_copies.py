"""Reports that are lost, doubled, late or of nobody: no request waits for ever, and vLLM hears of one end.

Under a corrupt ledger nothing is decided any more; what was promised to vLLM before is still told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from sim.broken_ledger import fail_in_a_fold, fail_to_observe_once
from sim.reported import note_reports
from sim.slow_copies import SlowCopies, slow_down

from kvledger.adapters.vllm.async_copies import AsyncCopies
from kvledger.adapters.vllm.metadata import JobReport, WorkerReports, reported_transfers
from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.copies import BlocksEnd

pytestmark = pytest.mark.scheduler

PROMPT = range(64)
asynchronous = pytest.mark.parametrize("async_scheduling", [False, True])
Tamper = Callable[[list[JobReport]], list[JobReport]]


def asynchronously(make_engine: Any, **options: Any) -> Any:
    """Everything runs asynchronously, and a worker's silence is noticed after four of them."""
    defaults = {
        "num_blocks": 40,
        "chunk_size": 8,
        "enable_prefix_caching": False,
        "load_mode": "async",
        "save_mode": "async",
        "max_silent_steps": 4,
    }
    engine = make_engine(**(defaults | options))
    for copies in slow_down(engine):
        copies.slow.clear()  # every copy is done when it was started, so that no thread decides a test
    return engine


def make_slow(engine: Any, *what: str) -> SlowCopies:
    """From now on the copies of the first rank pend."""
    copies: SlowCopies = engine.worker._worker_side._async_engine
    copies.slow.update(what)
    return copies


def tamper(engine: Any, change: Tamper, rank: int = 0) -> None:
    """From now on the reports of a rank go through `change`."""
    side = engine.workers[rank]._worker_side
    take = side.take_reports

    def changed() -> WorkerReports | None:
        taken = take()
        reports = tuple(change(list(taken.reports if taken is not None else ())))
        return WorkerReports(reports) if reports else None

    side.take_reports = changed


def lose_first(number: int) -> Tamper:
    """Lose the first reports; whoever asks again is answered."""
    lost: list[JobReport] = []

    def change(reports: list[JobReport]) -> list[JobReport]:
        kept = []
        for report in reports:
            (lost if len(lost) < number and not report.is_repeated else kept).append(report)
        return kept

    return change


@pytest.mark.parametrize("model_runner_v2", [False, True])
@pytest.mark.parametrize("has_drafter", [False, True])
def test_with_a_drafter_a_save_is_reported_a_step_later(
    make_engine: Any, has_drafter: bool, model_runner_v2: bool
) -> None:
    """The worker reports behind the forward, and saves behind the drafter's; nobody asks after it, it counts."""
    engine = make_engine(
        num_blocks=20,
        chunk_size=16,
        enable_prefix_caching=False,
        defer_finalize=has_drafter,
        model_runner_v2=model_runner_v2,
        max_silent_steps=2,
    )
    engine.serve("writer", PROMPT, 5)
    engine.serve("reader", PROMPT, 5)
    known = [type(event) for _, event in engine.events()]
    first_save = known.index(e.SaveIssued)
    steps_until_it_is_known = known[first_save : known.index(e.SaveCompleted)].count(e.StepScheduled)
    assert steps_until_it_is_known == has_drafter
    assert engine.check_answers("reader")[0].num_external_tokens == 63
    assert e.TransferAwaited not in known


@asynchronous
@pytest.mark.parametrize(("num_ranks", "silent_rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_lost_report_is_asked_after_and_repeated(
    make_engine: Any, async_scheduling: bool, num_ranks: int, silent_rank: int
) -> None:
    """One message too few is no failure: the save counts and the load arrives, each is told of once."""
    engine = asynchronously(make_engine, async_scheduling=async_scheduling, num_ranks=num_ranks)
    reported = note_reports(engine)
    tamper(engine, lose_first(1), silent_rank)
    engine.serve("writer", PROMPT, 2)
    assert reported.sent == ["writer"]
    tamper(engine, lose_first(1), silent_rank)
    engine.serve("reader", PROMPT, 2)
    assert reported.received == ["reader"]
    assert reported.failed == []
    asked = [event.job_id for event in engine.logged(e.TransferAwaited)]
    assert len(asked) >= 2
    repeated = [event for event in engine.logged(e.TransferReported) if event.is_repeated]
    assert {job_id for event in repeated for job_id in event.job_ids} == set(asked)
    assert engine.logged(e.SaveFailed, e.LoadFailed) == []
    assert engine.check_answers("reader")[0].num_external_tokens == 63


@asynchronous
def test_a_copy_that_is_only_slow_is_waited_for_when_it_is_asked_after(
    make_engine: Any, async_scheduling: bool
) -> None:
    """Nobody may give up on a copy that still writes; the worker finishes it and tells."""
    engine = asynchronously(make_engine, async_scheduling=async_scheduling)
    reported = note_reports(engine)
    engine.serve("writer", PROMPT, 2)
    copies = make_slow(engine, "load", "save")
    engine.serve("reader", PROMPT, 2)
    assert reported.received == ["reader"]
    assert reported.failed == []
    assert [copy.was_waited_for for copy in copies.started if copy.what == "load"] == [True]
    assert engine.logged(e.SaveFailed, e.LoadFailed) == []


@asynchronous
def test_a_worker_that_knows_nothing_of_a_copy_fails_it(make_engine: Any, async_scheduling: bool) -> None:
    """It was started again, say: the load counts as failed and is computed."""
    engine = asynchronously(make_engine, async_scheduling=async_scheduling)
    engine.serve("writer", PROMPT, 2)
    reported = note_reports(engine)
    make_slow(engine, "load")
    engine.add("reader", PROMPT, 2)
    engine.step()
    side = engine.worker._worker_side
    side._copies = AsyncCopies(0, side._clock)
    engine.run()
    assert (reported.received, reported.failed) == (["reader"], ["reader"])
    (failed,) = engine.logged(e.LoadFailed)
    assert "does not know this job" in failed.error


@asynchronous
def test_a_worker_that_reports_asynchronous_copies_only_when_asked_keeps_nobody(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, async_scheduling: bool
) -> None:
    """Each such copy takes `max_silent_steps` and `max_silent_ms`. Nothing fails, and no rule is broken."""
    engine = asynchronously(make_engine, async_scheduling=async_scheduling)
    monkeypatch.setattr(AsyncCopies, "take_done", lambda _: [])
    engine.serve("writer", PROMPT, 2)
    engine.serve("reader", PROMPT, 2)
    issued = {job.job_id for job in (*engine.logged(e.SaveIssued), *engine.logged(e.LoadIssued))}
    assert issued == {job.job_id for job in (*engine.logged(e.SaveCompleted), *engine.logged(e.LoadCompleted))}
    assert issued == {job.job_id for job in engine.logged(e.TransferAwaited)}
    assert engine.logged(e.LoadIssued, request_id="reader")
    assert engine.audit().violations == []


@asynchronous
def test_a_worker_that_never_reports_keeps_nobody(make_engine: Any, async_scheduling: bool) -> None:
    """It does not answer either: each job is given up, blocks are freed, loads are computed, each end is told once."""
    engine = asynchronously(make_engine, async_scheduling=async_scheduling)
    engine.serve("writer", PROMPT, 2)
    reported = note_reports(engine)
    tamper(engine, lambda _reports: [])
    engine.add("reader", PROMPT, 10)
    engine.serve("other", range(500, 540), 30, max_steps=200)
    assert (reported.received, reported.failed) == (["reader"], ["reader"])
    assert sorted(reported.sent) == ["other", "reader"]
    assert {violation.rule for violation in engine.logged(e.InvariantViolated)} == {"LIVENESS"}
    assert engine.logged(e.RequestQuarantined, e.HookFailed) == []


@asynchronous
def test_a_report_that_comes_after_its_job_was_given_up(make_engine: Any, async_scheduling: bool) -> None:
    """It is recorded and tells vLLM nothing: there the load has failed long ago."""
    engine = asynchronously(make_engine, async_scheduling=async_scheduling)
    engine.serve("writer", PROMPT, 2)
    reported = note_reports(engine)
    kept: list[JobReport] = []

    def keep(reports: list[JobReport]) -> list[JobReport]:
        kept.extend(report for report in reports if load_job in report.job_ids)
        return [report for report in reports if load_job not in report.job_ids]

    load_job = engine.projections.jobs.next_job_id
    tamper(engine, keep)
    engine.add("reader", PROMPT, 30)
    while not engine.logged(e.LoadFailed):
        engine.step()
    late = [attrs.evolve(report, is_repeated=False) for report in kept[:1]]
    tamper(engine, lambda reports: [*reports, *(late.pop() for _ in late[:1])])
    engine.run()
    assert (reported.received, reported.failed) == (["reader"], ["reader"])
    assert [violation.rule for violation in engine.logged(e.InvariantViolated)] == ["LIVENESS", "COMPLETION_ONCE"]
    assert engine.logged(e.RequestQuarantined, e.HookFailed) == []


@asynchronous
def test_a_report_of_a_rank_that_does_not_exist_settles_nothing(make_engine: Any, async_scheduling: bool) -> None:
    """A foreign rank says that everything is done while the real one still copies."""
    engine = asynchronously(make_engine, async_scheduling=async_scheduling, max_silent_steps=64)
    engine.serve("writer", PROMPT, 2)
    reported = note_reports(engine)
    copies = make_slow(engine, "load")
    job_id = engine.projections.jobs.next_job_id
    foreign = [JobReport((job_id,), 7, done=True, num_bytes=1, duration_ns=1)]
    tamper(engine, lambda reports: [*reports, *(foreign.pop() for _ in foreign[:1])])
    engine.add("reader", PROMPT, 2)
    for _ in range(5):
        engine.step()
    assert foreign == []
    assert reported.received == []
    (load,) = copies.pending()
    load.finish()
    engine.run()
    assert reported.received == ["reader"]
    assert [violation.rule for violation in engine.logged(e.InvariantViolated)] == ["COMPLETION_ONCE"]


@asynchronous
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_report_comes_twice(make_engine: Any, async_scheduling: bool, num_ranks: int) -> None:
    """In the same message and in the next: one rank does not stand for another, and nothing is told twice."""
    engine = asynchronously(make_engine, async_scheduling=async_scheduling, num_ranks=num_ranks, max_silent_steps=64)
    reported = note_reports(engine)
    earlier: list[JobReport] = []

    def double(reports: list[JobReport]) -> list[JobReport]:
        again = [*reports, *reports, *earlier]
        earlier[:] = reports
        return again

    tamper(engine, double, num_ranks - 1)
    for request_id in ("writer", "reader"):
        engine.serve(request_id, PROMPT, 6)
    assert reported.received == ["reader"]
    assert len(reported.sent) == len(set(reported.sent))
    assert engine.logged(e.RequestQuarantined, e.HookFailed, e.SaveFailed, e.LoadFailed) == []


# --- a corrupt ledger ------------------------------------------------------------------------------


def serve_with_slow_copies(engine: Any, max_steps: int = 1500) -> None:
    """Three requests and their successors in a pool that is too small; copies end every third step."""
    copies = make_slow(engine, "load", "save")
    engine.add_crowd()
    for number_of_step in range(max_steps):
        if not engine.scheduler.has_requests() and not engine._in_flight:
            break
        engine.step()
        if number_of_step % 3 == 0:
            for copy in copies.pending():
                copy.finish()
        if number_of_step == 40:
            engine.add("successor", range(40), 50)
    assert engine.scheduler.requests == {}, f"{sorted(engine.scheduler.requests)} wait for ever"
    engine.drain()


@asynchronous
@pytest.mark.parametrize("num_before", [0, 4])
@pytest.mark.parametrize(
    "event_class",
    [
        e.LookupRequested,
        e.LookupAnswered,
        e.LookupDeferred,
        e.BlocksAllocated,
        e.LoadIssued,
        e.LoadCompleted,
        e.SaveIssued,
        e.SaveCompleted,
        e.TransferReported,
        e.TransferAwaited,
        e.RequestPreempted,
        e.RequestFinished,
        e.BlocksHeld,
        e.RequestReleased,
        e.StepScheduled,
    ],
)
def test_under_a_corrupt_ledger_nobody_waits_for_ever(
    make_engine: Any, event_class: type[e.Event], num_before: int, async_scheduling: bool
) -> None:
    """Loads, saves and held blocks are under way when a fold raises: every end is told, every block is free again."""
    engine = asynchronously(
        make_engine, replays=False, num_blocks=14, async_scheduling=async_scheduling, max_silent_steps=64
    )
    seen: list[int] = []
    fail_in_a_fold(engine, event_class, lambda: seen.append(1) or len(seen) > num_before)
    serve_with_slow_copies(engine)
    assert all(len(output) == 50 for output in engine.outputs.values())
    engine.check_outputs()
    assert engine.connector.scheduler_side.journal.is_disabled or len(seen) <= num_before


@asynchronous
def test_a_save_that_was_decided_and_not_begun_when_the_ledger_fails_keeps_nobody(
    make_engine: Any, async_scheduling: bool
) -> None:
    """VLLM was told to keep the blocks for it; it is begun, so that there is an end to tell."""
    engine = asynchronously(make_engine, replays=False, async_scheduling=async_scheduling)
    reported = note_reports(engine)
    fail_in_a_fold(
        engine,
        e.StepScheduled,
        lambda: any(its.blocks is BlocksEnd.KEPT_FOR_COPY for its in engine.projections.owed.state.ends.values()),
    )
    engine.serve("only", PROMPT, 9, max_steps=100)
    assert engine.connector.scheduler_side.journal.is_disabled
    assert engine.logged(e.SaveIssued)[-1].cause == engine.logged(e.BlocksHeld)[0].cause
    assert reported.sent == ["only"]


@asynchronous
def test_a_report_that_cannot_be_recorded_reaches_vllm_all_the_same(make_engine: Any, async_scheduling: bool) -> None:
    """The ledger is sound but failed over this report: vLLM hears of the end at once, the ledger asks later."""
    engine = asynchronously(make_engine, replays=False, async_scheduling=async_scheduling)
    engine.serve("writer", PROMPT, 2)
    reported = note_reports(engine)
    fail_to_observe_once(engine, lambda event: isinstance(event, e.TransferReported))
    engine.serve("reader", PROMPT, 30)
    assert len(engine.logged(e.HookFailed)) == 1
    assert (reported.received, reported.failed) == (["reader"], [])
    assert reported.sent.count("reader") <= 1
    assert len(engine.outputs["reader"]) == 30
    engine.check_released()


def test_the_bytes_of_saves_that_were_joined_add_up_to_what_was_moved() -> None:
    """Two ranks share a pool and write a part of the pages each; rounding lost two bytes of 13,787,136 in real vLLM."""
    projections = Core.standard().new_projections(LedgerConfiguration(block_size=16, chunk_size=16, num_slots=8))
    projections.fold(e.RequestArrived("a", 0, 64, 1), 1)
    projections.fold(e.SaveIssued("a", 0, 0, 1, (0,), (0,), (1,), False, True, 1), 2)
    projections.fold(e.SaveIssued("a", 0, 0, 2, (1, 2), (1, 2), (2, 3), False, True, 1), 3)
    reports = [JobReport((1, 2), rank, done=True, num_bytes=50, duration_ns=1) for rank in (0, 1)]
    (reported,) = reported_transfers(reports, projections, lambda: 1)
    assert reported.num_bytes == (33, 67)
