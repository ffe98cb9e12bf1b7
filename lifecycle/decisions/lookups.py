"""What to answer when the scheduler asks how much can be loaded.

Pure: any number of lookups equals one. The hit may come from the lookup cache, the answer never does: it is
computed against the `num_computed_tokens` of this very call. The one thing that may be answered instead of a number is
"ask again", for two reasons, each bounded:

- A save of the request's own is still under way, and it was preempted: at most `max_deferred_lookups` times in a row.
- Another request loads the same chunks, and vLLM's prefix cache shares the blocks afterwards: until that load ends, and
  for at most `max_deferred_lookups` such loads in a row. Loading them twice fills the device with copies (vllm#29087).

Three bounds below are there for vLLM 0.32 alone: who computes first (`_inflight_prefill_reserved_blocks` and
`kv_holding_waiting` in v1/core/sched/scheduler.py), one load after another, and asynchronous loads where there are
several groups (`_handle_invalid_blocks`, same file). The first two hang on what was folded, regions and jobs under way:
an adapter that lowered answers instead would fold that a second time, and the log would not have what was answered. The
third is one with the windows in the configuration, so that nobody can give one without the other.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from kvledger.lifecycle import events as e
from kvledger.lifecycle.decisions.boundaries import last_boundary
from kvledger.lifecycle.decisions.shared_loads import shared_load
from kvledger.lifecycle.events import MissReason
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.projections.transfers import JobKind
from kvledger.lifecycle.states import FirstRegion, TrustRegion
from kvledger.lifecycle.turn import Turn


class _Awaited(msgspec.Struct, frozen=True, gc=False):
    """A save in flight that would carry the hit to `num_tokens`."""

    job_id: int
    num_tokens: int


class _Hit(msgspec.Struct, frozen=True):
    """How far the host pool reaches, why no further, and what is about to carry it further."""

    num_tokens: int
    reason: MissReason
    reason_sequence: int = 0
    awaited: _Awaited | None = None


_VALUE_OF = {reason: reason.value for reason in MissReason}
"""A member's value is looked up in Python."""


def answer_lookup(turn: Turn, event: e.LookupRequested, *, awaits_saves: bool) -> e.LookupAnswered | e.LookupDeferred:
    """Answer with the usable hit beyond what is computed, leaving the last token to compute; or ask to ask again.

    Args:
        turn: of the request that is asked about.
        event: the question.
        awaits_saves: whether a save under way is worth being asked again for.
    """
    record, projections = turn.record, turn.projections
    usable, hit = _offered(event, record, projections)
    end_token = min(usable, event.num_tokens - 1)
    if projections.geometry.windows.forget:
        end_token, hit = _within_windows(end_token, hit, record, projections)
    shared = shared_load(end_token, event.num_computed_tokens, record, projections)
    if shared is not None:
        deferred = _deferred(turn, event, shared.job_id, is_shared=True)
        if deferred is not None:
            return deferred
    awaited = hit.awaited if awaits_saves else None
    if projections.geometry.windows.forget:
        end_token, rival = _one_after_another(end_token, event, record, projections)
        awaited = rival or awaited
    if awaited is not None and _helps(awaited, end_token, event, record, projections):
        deferred = _deferred(turn, event, awaited.job_id)
        if deferred is not None:
            return deferred
    return _answered(event, record, hit, end_token, projections, turn.cause)


def _offered(event: e.LookupRequested, record: RequestRecord, projections: Projections) -> tuple[int, _Hit]:
    """Tokens that may be used, and the hit that they are a part of."""
    hit = _find(event, record, projections)
    usable = _usable(hit.num_tokens, record, projections)
    if usable < hit.num_tokens:
        hit = replace(hit, reason=MissReason.LIMITED, reason_sequence=0, awaited=None)
    if not projections.configuration.offers_slow_loads and projections.costs.is_slower(event.time_ns):
        hit = replace(hit, awaited=None)
        if min(usable, event.num_tokens - 1) > event.num_computed_tokens:
            usable, hit = 0, replace(hit, reason=MissReason.SLOWER, reason_sequence=0)
    if record.first is FirstRegion.COMPUTES_FIRST:
        # vLLM 0.32 keeps such a request at the head of the queue of those that hold blocks. Another
        # asynchronous load may not fit next to what it reserves for those behind it, and then nobody moves any more.
        usable, hit = 0, replace(hit, reason=MissReason.LOAD_FAILED, reason_sequence=0, awaited=None)
    if record.trust is TrustRegion.QUARANTINED:
        usable, hit = 0, replace(hit, reason=MissReason.QUARANTINED, reason_sequence=0, awaited=None)
    return usable, hit


def _helps(
    awaited: _Awaited, end_token: int, event: e.LookupRequested, record: RequestRecord, projections: Projections
) -> bool:
    """Whether the job carries the hit further than what is computed or can be loaded now."""
    end_later = min(_usable(awaited.num_tokens, record, projections), event.num_tokens - 1)
    return end_later > max(event.num_computed_tokens, end_token)


def _deferred(turn: Turn, event: e.LookupRequested, job_id: int, *, is_shared: bool = False) -> e.LookupDeferred | None:
    """Ask to be asked again; None where that was done often enough."""
    count = turn.record.next_deferral(job_id, is_shared=is_shared)
    if count > turn.projections.configuration.max_deferred_lookups:
        return None
    life = turn.record.life
    return e.LookupDeferred(*life, event.num_computed_tokens, event.num_tokens, job_id, count, turn.cause)


def _usable(num_hit_tokens: int, record: RequestRecord, projections: Projections) -> int:
    """As much of a hit as the configuration lets the request use; a limit is a share of the prompt."""
    share = projections.configuration.max_hit_share
    return num_hit_tokens if share >= 1 else min(num_hit_tokens, int(record.num_prompt_tokens * share))


def _answered(
    event: e.LookupRequested, record: RequestRecord, hit: _Hit, end_token: int, projections: Projections, cause: int
) -> e.LookupAnswered:
    configuration, num_computed_tokens = projections.configuration, event.num_computed_tokens
    num_external_tokens, is_async = 0, False
    # Whole pages are loaded, so a load must start on a block boundary. vLLM presents a block-aligned local hit
    # (v1/core/sched/scheduler.py, 0.32); anything else is answered with nothing.
    if end_token > num_computed_tokens and num_computed_tokens % configuration.block_size == 0:
        num_external_tokens = end_token - num_computed_tokens
        # Where there are several groups, a request whose load failed can be reported to vLLM, but not blocks.
        has_groups = projections.geometry.windows.num_groups > 1
        async_from = 0 if has_groups else configuration.async_load_tokens
        is_async = async_from is not None and num_external_tokens >= async_from
    # By place, for there is one for every poll.
    return e.LookupAnswered(
        record.request_id,
        record.ordinal,
        record.generation,
        num_computed_tokens,
        event.num_tokens,
        hit.num_tokens,
        num_external_tokens,
        is_async,
        _VALUE_OF[hit.reason],
        hit.reason_sequence,
        cause,
    )


def _one_after_another(
    end_token: int, event: e.LookupRequested, record: RequestRecord, projections: Projections
) -> tuple[int, _Awaited | None]:
    """With several groups, no load while another request's is under way.

    vLLM 0.32 underestimates what a request that was loaded still needs, for it counts the null blocks of its windows as
    blocks (`v1/core/single_type_kv_cache_manager.py`, get_num_blocks_to_allocate). Several of them could hold the whole
    pool and wait for one another for ever.
    """
    if end_token > event.num_computed_tokens:
        for job in projections.transfers:
            if job.kind is JobKind.LOAD and job.ordinal != record.ordinal:
                return event.num_computed_tokens, _Awaited(job.job_id, end_token)
    return end_token, None


def _within_windows(num_tokens: int, hit: _Hit, record: RequestRecord, projections: Projections) -> tuple[int, _Hit]:
    end_token = last_boundary(num_tokens, record, projections)
    if end_token == num_tokens:
        return end_token, hit
    # What is missing may be on its way by a save of this very request; otherwise nobody will bring it.
    own = [job for job in projections.transfers.of_life(record.ordinal) if job.kind is JobKind.SAVE]
    awaited = hit.awaited or (_Awaited(own[-1].job_id, num_tokens) if own else None)
    return end_token, replace(hit, reason=MissReason.WINDOW, reason_sequence=0, awaited=awaited)


def _find(event: e.LookupRequested, record: RequestRecord, projections: Projections) -> _Hit:
    num_chunks = projections.lookups.num_hit_chunks(event.request_id, record.generation)
    num_tokens = num_chunks * projections.configuration.chunk_size
    hit = _why_chunks_end(record, num_chunks, num_tokens, projections)
    tail = record.tail
    if tail is not None and tail.first_token > num_tokens and hit.awaited is not None:
        # The chunks under way are the request's own or another's; behind them its tail is under way, or here.
        return replace(hit, awaited=_Awaited(hit.awaited.job_id, max(hit.awaited.num_tokens, tail.end_token)))
    if tail is None or tail.first_token != num_tokens:
        return hit
    if not tail.is_saved:
        return replace(hit, awaited=_Awaited(tail.job_id, tail.end_token))
    if tail.end_token >= event.num_tokens - 1:
        return _Hit(tail.end_token, MissReason.COMPLETE)
    return replace(hit, num_tokens=tail.end_token, awaited=None)


def _why_chunks_end(record: RequestRecord, num_hit_chunks: int, num_tokens: int, projections: Projections) -> _Hit:
    keys = record.keys
    if num_hit_chunks >= len(keys):
        return _Hit(num_tokens, MissReason.COMPLETE)
    missing = keys[num_hit_chunks]
    if projections.chunks.is_saving(missing):
        job = projections.transfers.saving(missing)
        end_token = 0 if job is None else (job.chunks[-1] + 1) * projections.configuration.chunk_size
        return _Hit(num_tokens, MissReason.SAVING, awaited=None if job is None else _Awaited(job.job_id, end_token))
    departed = projections.chunks.departed(missing)
    if departed is not None:
        return _Hit(num_tokens, departed.reason, departed.sequence)
    return _Hit(num_tokens, MissReason.NEVER_SAVED)
