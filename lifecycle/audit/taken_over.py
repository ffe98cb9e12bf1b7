"""Where an audit begins in the middle of a log: the state there, as the plain data that its model begins with.

The one part of the audit that looks at live projections. What it takes over is trusted, not judged; whatever comes
behind is judged by the model alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import deepcopy

from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.projections import Projections, costs
from kvledger.lifecycle.projections.copies import Copy as LiveCopy
from kvledger.lifecycle.projections.copies import CopyKind
from kvledger.lifecycle.projections.pool import Pool
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.reader.records import NEVER, Answer, Copy, IssuedTail, Life, Prefix
from kvledger.lifecycle.reader.start import Measured, Start
from kvledger.lifecycle.states import CurrentRegion, FirstRegion, SourceRegion, TrustRegion, WorkRegion


def taken_over(projections: Projections) -> Start:
    """A copy of all that the audit's model has to know."""
    tracker, jobs, pool = projections.tracker, projections.jobs, projections.pool
    records = list(tracker)
    tails = {record.ordinal: record.tail for record in records}
    promised, wanted = pool.promised, pool.wanted
    of_extensions = {name for extension in projections.tables.extensions for name in extension.projections}
    return Start(
        num_steps=tracker.num_steps,
        time_ns=tracker.time_ns,
        num_arrived=tracker.num_arrived,
        lives=[_life(record, projections) for record in records],
        held={record.ordinal: array("I", record.block_ids or ()) for record in records},
        lost={record.ordinal: array("I", record.lost_block_ids or ()) for record in records},
        leaving={each.request_id: each.window_freed_at for each in records if each.window_freed_at is not None},
        left={
            each.request_id: each.window_freed_before_step
            for each in records
            if each.window_freed_before_step is not None
        },
        jobs=[_copy(job, pool) for job in jobs],
        given_up=[_copy(job, pool) for job in jobs.given_up.values()],
        last_job_id=jobs.next_job_id - 1,
        epoch=jobs.epoch,
        committed={key: pool.get(key) or () for key in pool},
        uses=[pool.forest.path(key) for key in pool.state.queue],
        tails={
            ordinal: IssuedTail(
                tail.job_id, 0, tail.first_token, tail.end_token, tail.slots, tail.is_saved, tail.load_id
            )
            for ordinal, tail in tails.items()
            if tail is not None
        },
        waited_for={
            record.request_id: _prefix(record.ordinal, wanted[record.request_id])
            for record in records
            if record.request_id in wanted
        },
        answers={
            record.request_id: Answer(
                record.answered_at,
                record.answer,
                _prefix(record.ordinal, promised.get(record.request_id, ())),
            )
            for record in records
            if record.answer is not None
        },
        num_deferred={each.request_id: each.num_deferrals for each in records if each.num_deferrals},
        deferred_for={each.request_id: each.deferred_for for each in records if each.deferred_for},
        costs=_measured(projections.costs.state),
        cursors={record.request_id: record.num_chunks_handled for record in records},
        has_hook_failed=tracker.state.has_hook_failed,
        of_extensions={name: deepcopy(state) for name, state in projections.states().items() if name in of_extensions},
        stopped_extensions=dict(projections.extensions.state.stopped),
    )


def _life(record: RequestRecord, projections: Projections) -> Life:
    computed = projections.tracker.computed
    return Life(
        record.request_id,
        record.ordinal,
        record.num_prompt_tokens,
        record.num_tokens,
        state=record.state,
        blocks=record.blocks,
        generation=record.generation,
        num_failed_loads=record.num_failed_loads,
        sub_state=record.sub,
        state_since_ns=record.state_since_ns,
        num_preemptions=record.num_preemptions,
        num_tokens_before_preemption=record.num_tokens_before_preemption,
        computes_first=record.first is FirstRegion.COMPUTES_FIRST,
        quarantined=record.trust is TrustRegion.QUARANTINED,
        stale_generation=record.generation if record.current is CurrentRegion.STALE else NEVER,
        counted_tokens=computed.count(record.ordinal),
        decoding_since=computed.num_steps if record.ordinal in computed.decoding else NEVER,
        keys=list(record.keys),
    )


def _measured(measured: costs.State) -> Measured:
    return Measured(
        list(measured.steps),
        list(measured.samples),
        list(measured.loads),
        dict(measured.loading),
        measured.declined_until_ns,
    )


def _prefix(ordinal: int, keys: Sequence[bytes]) -> Prefix:
    return Prefix(ordinal, list(keys), len(keys))


def _copy(job: LiveCopy, pool: Pool) -> Copy:
    return Copy(
        0,
        job.job_id,
        job.request_id,
        job.ordinal,
        job.generation,
        job.kind is CopyKind.LOAD,
        job.is_async,
        job.chunks,
        job.keys,
        job.earlier_keys,
        job.slots,
        job.block_ids,
        _prefix(job.ordinal, pool.forest.path(pool.state.copying.get(job.job_id))),
        job.epoch,
        job.asked_step,
        job.asked_ns,
        NO_SLOT in job.slots,
        job.work is WorkRegion.OVERDUE,
        job.source is SourceRegion.FENCED,
        ranks_done=frozenset(job.ranks_done),
        ranks_failed=frozenset(job.ranks_failed),
    )
