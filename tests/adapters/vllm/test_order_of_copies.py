"""Workers say in which hook of which step each copy began and ended, and what a step's output holds."""

from __future__ import annotations

from typing import Any

import pytest

from kvledger.adapters.lab.simulation.hashed_model import HashedModel
from kvledger.adapters.vllm.metadata import StepJobs
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.copy_moments import CopyMoments, Hook

pytestmark = pytest.mark.scheduler

OPTIONS: dict[str, Any] = {"chunk_size": 16, "num_ranks": 2, "load_mode": "sync", "save_mode": "sync"}


def crowd(engine: Any, num_requests: int = 5) -> None:
    """More requests than fit into the pool, so that some are preempted, saved before a forward and loaded."""
    for number in range(num_requests):
        engine.add(f"request {number}", range(100 * number, 100 * number + 60), 40)
    engine.run()


def audit_of(engine: Any) -> Audit:
    """The finished audit of the engine's log."""
    audit = Audit(Core.standard(), engine.connector.scheduler_side.journal.configuration)
    engine.connector.scheduler_side.ledger.commit()
    audit.run(engine.events())
    return audit


def test_ranks_that_do_the_same_are_one_event_with_the_moments_of_both(make_engine: Any) -> None:
    """Each copy in the hook that is for it, with the step with which it was handed out."""
    engine = make_engine(num_blocks=16, **OPTIONS)
    crowd(engine)
    delivered = {
        job_id: sequence
        for sequence, event in engine.events()
        if isinstance(event, e.EffectsDelivered)
        for job_id in event.job_ids
    }
    hooks = {job.job_id: Hook.START_LOAD_KV for job in engine.logged(e.LoadIssued)}
    hooks |= {
        job.job_id: Hook.HANDLE_PREEMPTIONS if job.before_forward else Hook.WAIT_FOR_SAVE
        for job in engine.logged(e.SaveIssued)
    }
    hooks |= {job.job_id: Hook.HANDLE_PREEMPTIONS for job in engine.logged(e.TailSaveIssued)}
    reports = engine.logged(e.TransferReported)
    assert {hooks[report.job_ids[0]] for report in reports} == {*Hook} - {Hook.OUTPUT, Hook.UNREGISTER_KV_CACHES}
    for report in reports:
        moments = CopyMoments.of_fields(report.moments)
        assert moments is not None
        assert report.ranks_done == (0, 1)
        assert {moments.began.hook, moments.ended.hook} == {hooks[report.job_ids[0]]}
        assert {moments.began.delivered, moments.ended.delivered} == {delivered[report.job_ids[0]]}
    steps = engine.logged(e.StepReported)
    assert {step.delivered for step in steps} == {delivered[report.job_ids[0]] for report in reports}
    assert {(step.ranks, step.under_way) for step in steps} == {((0, 1), ())}
    assert audit_of(engine).is_sound


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong KV is computed with, as in production: it is the log that shall show the mistake."""
    monkeypatch.setattr(HashedModel, "_check", lambda *_: None)


@pytest.mark.usefixtures("unwatched")
def test_a_rank_whose_handle_preemptions_does_nothing_is_named(make_engine: Any) -> None:
    """It copies when it loads, which may be after the forward that has overwritten the blocks."""
    engine = make_engine(num_blocks=16, replays=False, **OPTIONS)
    engine.workers[1]._worker_side.before_forward = lambda _jobs: None
    crowd(engine)
    found = [violation.detail for violation in audit_of(engine).violations]
    assert found
    assert all(
        "of ranks [1]: it began in start_load_kv of its step, not in handle_preemptions" in each for each in found
    )


@pytest.mark.usefixtures("unwatched")
def test_a_rank_that_leaves_out_a_load_is_named_with_the_output_of_that_step(make_engine: Any) -> None:
    """`stats` said that tokens were still to be loaded, and the log was called sound."""
    engine = make_engine(num_blocks=16, replays=False, **OPTIONS)
    side = engine.workers[1]._worker_side
    load, left_out = side.load, []

    def leave_out_one(jobs: StepJobs) -> None:
        if jobs.loads and not left_out:
            left_out.append(jobs.loads[0].job_id)
            side._begin(jobs)
            side._executed.update(left_out)
        load(jobs)

    side.load = leave_out_one
    crowd(engine)
    violation = audit_of(engine).violations[0]
    assert violation.rule == "COPY_IN_TIME"
    assert f"job {left_out[0]}, load, is not among the reports of ranks [1]" in violation.detail


@pytest.mark.parametrize("save_mode", ["sync", "async"])
@pytest.mark.parametrize("num_steps", [1, 2, 5, 9])
def test_an_engine_that_is_shut_down_in_the_middle_breaks_no_rule(
    make_engine: Any, save_mode: str, num_steps: int
) -> None:
    """The outputs of its last steps are never processed."""
    engine = make_engine(num_blocks=16, async_scheduling=True, **(OPTIONS | {"save_mode": save_mode, "num_ranks": 1}))
    for number in range(4):
        engine.add(f"request {number}", range(100 * number, 100 * number + 60), 40)
    for _ in range(num_steps):
        engine.step()
    engine.connector._edge.record()  # what `shutdown` does, except that the log stays open for the checks at the end
    engine.connector.scheduler_side.journal.observe(e.LogNote(e.SHUT_DOWN, 1 << 40))
    assert audit_of(engine).violations == []
    engine.run()
