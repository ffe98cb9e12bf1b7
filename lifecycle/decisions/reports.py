"""What a worker's report means: a job goes on, is settled, or was none of ours."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.transfers import Job, JobKind
from kvledger.lifecycle.rules import Rule
from kvledger.lifecycle.states import TrustRegion
from kvledger.lifecycle.turn import EngineTurn


def settle(turn: EngineTurn, job: Job) -> None:
    """Settle a job that every rank has reported. One failed rank fails it for all."""
    if (
        job.ranks_failed
        or job.is_doubtful
        or (job.kind is JobKind.SAVE and turn.projections.transfers.relies_on_load(job))
    ):
        error = job.error if job.ranks_failed else "its blocks turned out not to hold what they should"
        _fail(turn, job, error, quiet=True)
    else:
        completed = e.LoadCompleted if job.kind is JobKind.LOAD else e.SaveCompleted
        turn.decide(completed(*job.life, job.job_id, turn.cause))


def _fail(turn: EngineTurn, job: Job, error: str, *, quiet: bool) -> None:
    projections, cause = turn.projections, turn.cause
    if job.kind is JobKind.SAVE:
        turn.decide(e.SaveFailed(*job.life, job_id=job.job_id, error=error, quiet=quiet, cause=cause))
        return
    turn.decide(e.LoadFailed(*job.life, job_id=job.job_id, error=error, cause=cause))
    for key in job.keys:
        if projections.chunks.get(key) is not None:
            turn.decide(e.ChunkTainted(key=key, cause=cause))
    record = projections.tracker.of(job.ordinal)
    if record is None or record.trust is TrustRegion.QUARANTINED:
        return
    if record.num_failed_loads >= projections.configuration.max_failed_loads:
        reason = f"{record.num_failed_loads} loads failed"
        turn.decide(e.RequestQuarantined(*record.life, reason, cause))


def check_report(turn: EngineTurn, event: e.TransferReported, job_id: int, job: Job | None) -> None:
    """A report for a job that is settled or never was, or by a rank that there is not: recorded, harmless.

    The first word of a rank about a save that was given up comes late, and is what its slots wait for.
    """
    projections = turn.projections
    foreign = [rank for rank in (*event.ranks_done, *event.ranks_failed) if rank >= projections.configuration.num_ranks]
    if foreign:
        detail = f"job {job_id} was reported by ranks {foreign}, which do not exist"
    elif job is not None and job.repeated_ranks:
        detail = f"job {job_id} was reported by ranks {sorted(job.repeated_ranks)}, which had done so before"
    elif job is not None or event.is_repeated:
        return
    elif job_id < projections.transfers.next_job_id:
        detail = f"job {job_id} was reported, but it has been settled before"
    else:
        detail = f"job {job_id} was reported, but no such job was ever issued"
    turn.decide(e.InvariantViolated(Rule.COMPLETION_ONCE.value, "", e.NO_LIFE, e.NO_LIFE, detail, turn.cause))


def ask_after(turn: EngineTurn, job: Job, *, before_forward: bool) -> None:
    """Let the workers finish the job and report it, once more if need be."""
    turn.decide(e.TransferAwaited(*job.life, job.job_id, before_forward, turn.cause))


def give_up_unfenced(turn: EngineTurn, job: Job) -> None:
    """Fail a save out of blocks that a step took without waiting for it; a worker may still write its slots."""
    _fail(turn, job, "a step took its blocks without waiting for it", quiet=False)


def give_up_silent(turn: EngineTurn, job: Job) -> None:
    """Fail a job that a rank has not reported although asked, so that nothing waits for ever."""
    detail = f"job {job.job_id} was not reported, although it was asked after"
    turn.decide(e.InvariantViolated(Rule.LIVENESS.value, *job.life, detail, turn.cause))
    _fail(turn, job, detail, quiet=False)
