"""Makes the decisions that follow when a step schedules a request, or when workers report a copy.

When a load is settled, its request can make progress. When the last copy of a finished request is settled, the request
is released.
"""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.copies import Copy, CopyKind
from kvledger.lifecycle.rules import Rule
from kvledger.lifecycle.states import BlocksRegion, TrustRegion
from kvledger.lifecycle.turn import EngineTurn, Turn

# --- of a request ------------------------------------------------------------------------------


def report_progress(turn: Turn) -> None:
    """Record the progress of the prefill, if tokens are computed and no load is filling the request's blocks."""
    request = turn.record
    num_computed_tokens = turn.projections.tracker.num_computed_tokens(request)
    if num_computed_tokens and request.blocks is not BlocksRegion.LOADING:
        event_class = e.PrefillCompleted if num_computed_tokens >= request.num_tokens else e.PrefillAdvanced
        turn.decide(event_class(*request.life, num_computed_tokens, request.num_tokens, turn.cause))


def release_if_settled(turn: Turn) -> None:
    """Release a finished request that has no copy in flight."""
    if not turn.projections.jobs.owes(turn.record.ordinal):
        turn.decide(e.RequestReleased(*turn.record.life, turn.cause))


# --- of a copy ---------------------------------------------------------------------------------


def check_report(turn: EngineTurn, event: e.TransferReported, job_id: int, job: Copy | None) -> None:
    """Record a broken rule if a rank does not exist, reports again unasked, or reports a copy that is not in flight.

    Such a report does no harm. A rank's first report of a save that was given up breaks no rule: the slots of the save
    are free only after this report. `job` is the copy `job_id`; None if this copy is settled or was never issued.
    """
    projections = turn.projections
    foreign = [rank for rank in (*event.ranks_done, *event.ranks_failed) if rank >= projections.configuration.num_ranks]
    if foreign:
        detail = f"job {job_id} was reported by ranks {foreign}, which do not exist"
    elif job is not None and job.repeated_ranks:
        detail = f"job {job_id} was reported by ranks {sorted(job.repeated_ranks)}, which had already reported it"
    elif job is not None or event.is_repeated:
        return
    elif job_id < projections.jobs.next_job_id:
        detail = f"job {job_id} was reported, but it was already settled"
    else:
        detail = f"job {job_id} was reported, but no such job was ever issued"
    turn.decide(e.InvariantViolated(Rule.COMPLETION_ONCE.value, "", e.NO_LIFE, e.NO_LIFE, detail, turn.cause))


def settle(turn: EngineTurn, job: Copy) -> None:
    """Settle a copy that every rank has reported. It fails if a rank failed, or if a save may have read wrong KV."""
    if job.ranks_failed:
        _fail(turn, job, job.error, quiet=True)
    elif job.is_doubtful or (job.kind is CopyKind.SAVE and turn.projections.jobs.relies_on_load(job)):
        _fail(turn, job, "the blocks that the save read may have held wrong contents", quiet=True)
    else:
        completed = e.LoadCompleted if job.kind is CopyKind.LOAD else e.SaveCompleted
        turn.decide(completed(*job.life, job.job_id, turn.cause))


def ask_after(turn: EngineTurn, job: Copy, *, before_forward: bool) -> None:
    """Decide to remind the workers of the copy. The next step waits for it.

    Without `before_forward`, all ranks also report the copy again.
    """
    turn.decide(e.TransferAwaited(*job.life, job.job_id, before_forward, turn.cause))


def give_up_unfenced(turn: EngineTurn, job: Copy) -> None:
    """Fail a save because a step that had to wait for the save did not wait, and may have overwritten the blocks.

    A worker may still be writing into the save's slots.
    """
    _fail(turn, job, "a step took its blocks without waiting for the save", quiet=False)


def give_up_silent(turn: EngineTurn, job: Copy) -> None:
    """Fail a copy that a rank has not reported although it was reminded. Otherwise vLLM would wait forever."""
    detail = f"job {job.job_id} was not reported, although kvledger asked for its report"
    turn.decide(e.InvariantViolated(Rule.LIVENESS.value, *job.life, detail, turn.cause))
    _fail(turn, job, detail, quiet=False)


def _fail(turn: EngineTurn, job: Copy, error: str, *, quiet: bool) -> None:
    """Fail a copy. A failed load taints its chunks, and too many failed loads quarantine the request.

    `quiet`: whether all ranks have stopped using the slots of the copy.
    """
    projections, cause = turn.projections, turn.cause
    if job.kind is CopyKind.SAVE:
        turn.decide(e.SaveFailed(*job.life, job_id=job.job_id, error=error, quiet=quiet, cause=cause))
        return
    turn.decide(e.LoadFailed(*job.life, job_id=job.job_id, error=error, cause=cause))
    tainted = tuple([key for key in job.keys if key in projections.pool])
    if tainted:
        turn.decide(e.ChunksTainted(tainted, cause))
    request = projections.tracker.of(job.ordinal)
    if request is None or request.trust is TrustRegion.QUARANTINED:
        return
    if request.num_failed_loads >= projections.configuration.max_failed_loads:
        reason = f"{request.num_failed_loads} loads failed"
        turn.decide(e.RequestQuarantined(*request.life, reason, cause))
