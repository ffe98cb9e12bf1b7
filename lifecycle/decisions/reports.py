"""What a worker's report means: a job goes on, is settled, or was none of ours."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.decisions import Decisions
from kvledger.lifecycle.projections.transfers import Job, JobKind
from kvledger.lifecycle.rules import Rule


def settle(job: Job, projections: Projections, cause: int) -> Decisions:
    """Settle a job that every rank has reported. One failed rank fails it for all."""
    failed = job.num_ranks_failed > 0
    if not failed:
        completed = e.LoadCompleted if job.kind is JobKind.LOAD else e.SaveCompleted
        yield completed(request_id=job.request_id, generation=job.generation, job_id=job.job_id, cause=cause)
        return
    yield from _fail(job, projections, job.error, cause, quiet=True)


def _fail(job: Job, projections: Projections, error: str, cause: int, *, quiet: bool) -> Decisions:
    request_id, generation, job_id = job.request_id, job.generation, job.job_id
    if job.kind is JobKind.SAVE:
        yield e.SaveFailed(
            request_id=request_id, generation=generation, job_id=job_id, error=error, quiet=quiet, cause=cause
        )
        return
    yield e.LoadFailed(request_id=request_id, generation=generation, job_id=job_id, error=error, cause=cause)
    for key in job.keys:
        if projections.chunks.get(key) is not None:
            yield e.ChunkTainted(key=key, cause=cause)


def refuse_unknown(event: e.TransferReported, cause: int) -> Decisions:
    """A report for a job that is settled or never was: recorded, harmless."""
    detail = f"job {event.job_id} was reported, but no such job is in flight"
    yield e.InvariantViolated(rule=Rule.COMPLETION_ONCE.value, request_id="", detail=detail, cause=cause)


def give_up_silent(job: Job, projections: Projections, cause: int) -> Decisions:
    """Fail a job that no rank has reported for too many steps, so that nothing waits for ever."""
    silent_steps = projections.tracker.num_steps - job.issued_step
    detail = f"job {job.job_id} was not reported for {silent_steps} steps"
    yield e.InvariantViolated(rule=Rule.LIVENESS.value, request_id=job.request_id, detail=detail, cause=cause)
    yield from _fail(job, projections, detail, cause, quiet=False)
