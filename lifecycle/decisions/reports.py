"""What a worker's report means: a job goes on, is settled, or was none of ours."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.decisions import Decisions
from kvledger.lifecycle.projections.transfers import Job, JobKind
from kvledger.lifecycle.rules import Rule


def settle(job: Job, projections: Projections, cause: int) -> Decisions:
    """Settle a job that every rank has reported. One failed rank fails it for all."""
    if job.ranks_failed or job.is_doubtful or (job.kind is JobKind.SAVE and projections.transfers.relies_on_load(job)):
        error = job.error if job.ranks_failed else "its blocks turned out not to hold what they should"
        return _fail(job, projections, error, cause, quiet=True)
    completed = e.LoadCompleted if job.kind is JobKind.LOAD else e.SaveCompleted
    return iter((completed(job.request_id, job.generation, job.job_id, cause),))


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
    record = projections.tracker.by_ordinal(job.ordinal)
    if record is None or record.quarantined:
        return
    if record.num_failed_loads >= projections.configuration.max_failed_loads:
        reason = f"{record.num_failed_loads} loads failed"
        yield e.RequestQuarantined(request_id=request_id, reason=reason, cause=cause)


def check_report(event: e.TransferReported, projections: Projections, cause: int) -> Decisions:
    """A report for a job that is settled or never was, or by a rank that there is not: recorded, harmless."""
    job = projections.transfers.get(event.job_id)
    foreign = [rank for rank in (*event.ranks_done, *event.ranks_failed) if rank >= projections.configuration.num_ranks]
    if foreign:
        detail = f"job {event.job_id} was reported by ranks {foreign}, which do not exist"
    elif job is not None and job.told_twice:
        detail = f"job {event.job_id} was reported by ranks {sorted(job.told_twice)}, which had done so before"
    elif job is not None or event.is_repeated:
        return
    elif event.job_id < projections.transfers.next_job_id:
        detail = f"job {event.job_id} was reported, but it has been settled before"
    else:
        detail = f"job {event.job_id} was reported, but no such job was ever issued"
    yield e.InvariantViolated(rule=Rule.COMPLETION_ONCE.value, request_id="", detail=detail, cause=cause)


def ask_after(job: Job, cause: int, *, before_forward: bool) -> Decisions:
    """Let the workers finish the job and tell about it, once more if need be."""
    return iter((e.TransferAwaited(job.request_id, job.generation, job.job_id, before_forward, cause),))


def give_up_silent(job: Job, projections: Projections, cause: int) -> Decisions:
    """Fail a job that a rank has not reported although asked, so that nothing waits for ever."""
    detail = f"job {job.job_id} was not reported, although it was asked after"
    yield e.InvariantViolated(rule=Rule.LIVENESS.value, request_id=job.request_id, detail=detail, cause=cause)
    yield from _fail(job, projections, detail, cause, quiet=False)
