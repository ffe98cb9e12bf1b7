"""Answers lookups: the scheduler asks how many tokens can be loaded.

Any number of lookups in a row has the effect of one lookup. The hit may come from the lookup cache, but the answer is
always computed again, for the `num_computed_tokens` of the present call.

Instead of a number, the answer may be "ask again later". A lookup is deferred at most `max_deferred_lookups` times in a
row, for one of these reasons:

- A save in flight will extend the hit.
- With windows: a load of another request is in flight.
- Another request loads the same chunks, and vLLM's prefix cache shares the blocks afterwards. All deferrals for one
  load of this kind count as one. Loading the chunks twice would fill the device with copies (vllm#29087).

Three limits exist only because of vLLM 0.32:

- After a failed load, a request must compute tokens before it is offered another load
  (`_inflight_prefill_reserved_blocks` and `kv_holding_waiting` in `v1/core/sched/scheduler.py`).
- With windows, only one load runs at a time.
- With several groups of layers, loads are asynchronous (`_handle_invalid_blocks`, same file).

The adapter must not apply these limits to an answer, because the log would then not contain the answer that vLLM got.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec
from msgspec.structs import replace

from kvledger.lifecycle import events as e
from kvledger.lifecycle.decisions.windows import last_boundary
from kvledger.lifecycle.events import MissReason
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.copies import Copy, CopyKind
from kvledger.lifecycle.projections.request_record import RequestRecord, Tail
from kvledger.lifecycle.states import FirstRegion, RequestState, TrustRegion
from kvledger.lifecycle.turn import Turn


class _Awaited(msgspec.Struct, frozen=True, gc=False):
    """A copy in flight. When it is over, the request could load tokens up to `end_token`."""

    job_id: int
    end_token: int


class _Hit(msgspec.Struct, frozen=True):
    """Which tokens of a request are in the host pool, and which of these the request may load."""

    num_tokens: int
    """Number of tokens in the host pool, counted from token 0 up to the first one that is missing."""
    end_token: int
    """Number of tokens up to which the request may load: at most `num_tokens`, and never all known tokens."""
    reason: MissReason
    """Why the request may not load more tokens."""
    awaited: _Awaited | None = None
    """The copy in flight after which the request could load more tokens; None if there is none."""


_VALUE_OF = {reason: reason.value for reason in MissReason}
"""Reason → its value, because `Enum.value` is slow."""


def answer_lookup(turn: Turn, event: e.LookupRequested, *, awaits_saves: bool) -> e.LookupAnswered | e.LookupDeferred:
    """Return an answer or a deferral. An answer offers tokens that follow the computed tokens.

    With `awaits_saves`, the lookup is deferred while a save in flight will let the request load more tokens.
    """
    request, projections, num_computed_tokens = turn.record, turn.projections, event.num_computed_tokens
    has_windows = projections.geometry.windows.has_any
    hit = _limited(_find_hit(event, request, projections), event, request, projections)
    if has_windows:
        hit = _within_windows(hit, request, projections)
    end_token, awaited = hit.end_token, hit.awaited if awaits_saves else None
    if projections.jobs.async_loads and end_token > num_computed_tokens:
        shared = shared_load(end_token, num_computed_tokens, request, projections)
        deferred = None if shared is None else _deferred(turn, event, shared.job_id, is_shared=True)
        if deferred is not None:
            return deferred
    if has_windows and end_token > num_computed_tokens:
        other = _load_of_another(request, projections)
        if other is not None:
            end_token, awaited = num_computed_tokens, _Awaited(other.job_id, end_token)
    if awaited is not None and min(awaited.end_token, event.num_tokens - 1) > max(num_computed_tokens, end_token):
        deferred = _deferred(turn, event, awaited.job_id, is_shared=False)
        if deferred is not None:
            return deferred
    return _answered(turn, event, hit, end_token)


def _deferred(turn: Turn, event: e.LookupRequested, job_id: int, *, is_shared: bool) -> e.LookupDeferred | None:
    """Return the decision to defer the lookup because of this copy; None after the last allowed deferral."""
    num_deferred = turn.record.next_deferral(job_id, is_shared=is_shared)
    if num_deferred > turn.projections.configuration.max_deferred_lookups:
        return None
    asked = (event.num_computed_tokens, event.num_tokens)
    return e.LookupDeferred(*turn.record.life, *asked, job_id, num_deferred, turn.cause)


def _answered(turn: Turn, event: e.LookupRequested, hit: _Hit, end_token: int) -> e.LookupAnswered:
    """Return an answer that offers the tokens from the end of the computed ones up to `end_token`."""
    request, configuration = turn.record, turn.projections.configuration
    num_external_tokens, is_async = 0, False
    # Whole pages are loaded, so a load must start on a block boundary. vLLM's own hits end on one
    # (v1/core/sched/scheduler.py, 0.32). For any other hit, offer nothing.
    if end_token > event.num_computed_tokens and event.num_computed_tokens % configuration.block_size == 0:
        num_external_tokens = end_token - event.num_computed_tokens
        # With several groups, vLLM accepts the report that a request's load failed, but not which blocks.
        has_groups = turn.projections.geometry.windows.num_groups > 1
        async_from = 0 if has_groups else configuration.async_load_tokens
        is_async = async_from is not None and num_external_tokens >= async_from
    return e.LookupAnswered(
        request.request_id,
        request.ordinal,
        request.generation,
        event.num_computed_tokens,
        event.num_tokens,
        hit.num_tokens,
        num_external_tokens,
        is_async=is_async,
        miss_reason=_VALUE_OF[hit.reason],
        cause=turn.cause,
    )


# --- what is in the host pool ------------------------------------------------------------------


def _find_hit(event: e.LookupRequested, request: RequestRecord, projections: Projections) -> _Hit:
    """Return the hit of the request's saved chunks and its tail."""
    num_chunks = projections.lookup_cache.num_hit_chunks(request)
    num_tokens = num_chunks * projections.configuration.chunk_size
    end_token = min(num_tokens, event.num_tokens - 1)
    if num_chunks < len(request.keys):
        hit = _hit_before(request.keys[num_chunks], num_tokens, end_token, projections)
    else:
        hit = _Hit(num_tokens, end_token, MissReason.COMPLETE)
    return hit if request.tail is None else _with_tail(request.tail, hit, event)


def _hit_before(key: bytes, num_tokens: int, end_token: int, projections: Projections) -> _Hit:
    """Return the hit that ends before the chunk with this key. Its reason says why the pool lacks that chunk."""
    if projections.pool.is_saving(key):
        save = projections.jobs.saving(key)
        if save is None:
            return _Hit(num_tokens, end_token, MissReason.SAVING)
        end_of_save = (save.chunks[-1] + 1) * projections.configuration.chunk_size
        return _Hit(num_tokens, end_token, MissReason.SAVING, awaited=_Awaited(save.job_id, end_of_save))
    return _Hit(num_tokens, end_token, MissReason.MISSING)


def _with_tail(tail: Tail, hit: _Hit, event: e.LookupRequested) -> _Hit:
    """Extend the hit by the request's tail, if the tail follows the chunks of the hit.

    If the tail or a chunk before it is being saved, let the hit wait for that save.
    """
    if tail.first_token > hit.num_tokens and hit.awaited is not None:
        # The chunks before the tail are being saved. After that, the tail is saved too, or still being saved.
        return replace(hit, awaited=_Awaited(hit.awaited.job_id, max(hit.awaited.end_token, tail.end_token)))
    if tail.first_token != hit.num_tokens:
        return hit
    if not tail.is_saved:
        return replace(hit, awaited=_Awaited(tail.job_id, tail.end_token))
    last_token = event.num_tokens - 1
    end_token = min(tail.end_token, last_token)
    if tail.end_token >= last_token:
        return _Hit(tail.end_token, end_token, MissReason.COMPLETE)
    return replace(hit, num_tokens=tail.end_token, end_token=end_token, awaited=None)


# --- how much of it may be loaded --------------------------------------------------------------


def _limited(hit: _Hit, event: e.LookupRequested, request: RequestRecord, projections: Projections) -> _Hit:
    """Return the hit, but with no tokens to load if the request may load nothing now."""
    configuration = projections.configuration
    if request.trust is TrustRegion.QUARANTINED:
        return _unusable(hit, MissReason.QUARANTINED)
    if request.first is FirstRegion.COMPUTES_FIRST:
        # vLLM 0.32 keeps such a request first in the queue of requests that hold blocks. Another asynchronous load may
        # not fit into the blocks that vLLM leaves to the requests after it. Then no request gets blocks any more.
        return _unusable(hit, MissReason.LOAD_FAILED)
    if not configuration.offers_slow_loads and projections.costs.is_slower(event.time_ns):
        has_offer = hit.end_token > event.num_computed_tokens
        return _unusable(hit, MissReason.SLOWER) if has_offer else replace(hit, awaited=None)
    return hit


def _unusable(hit: _Hit, reason: MissReason) -> _Hit:
    """Return the hit with no tokens to load, and with this reason."""
    return replace(hit, end_token=0, reason=reason, awaited=None)


def _within_windows(hit: _Hit, request: RequestRecord, projections: Projections) -> _Hit:
    """Return the hit, shortened to a length after which every page that the next token sees is stored."""
    end_token = last_boundary(hit.end_token, request, projections)
    if end_token == hit.end_token:
        return hit
    # A save of this request may bring what is missing; no other request's save does.
    saves = [job for job in projections.jobs.of_life(request.ordinal) if job.kind is CopyKind.SAVE]
    awaited = hit.awaited or (_Awaited(saves[-1].job_id, hit.end_token) if saves else None)
    return replace(hit, end_token=end_token, reason=MissReason.WINDOW, awaited=awaited)


# --- loads of other requests -------------------------------------------------------------------


def _load_of_another(request: RequestRecord, projections: Projections) -> Copy | None:
    """Return another request's load that is in flight, or None. With windows, no load begins before that load is over.

    vLLM 0.32 underestimates the blocks that a request needs after a load: it counts the null blocks of the request's
    windows as blocks (`v1/core/single_type_kv_cache_manager.py`, get_num_blocks_to_allocate). Several such requests
    could hold all blocks of the device and wait for one another forever.
    """
    loads = (job for job in projections.jobs if job.kind is CopyKind.LOAD and job.ordinal != request.ordinal)
    return next(loads, None)


def shared_load(
    end_token: int, num_computed_tokens: int, request: RequestRecord, projections: Projections
) -> Copy | None:
    """Return the asynchronous load of another request whose blocks this request can share; None if there is none.

    If requests did not wait for this load, each request of a burst with the same long prefix would load the prefix.
    The copies would fill the device (vllm#29087). vLLM's prefix cache shares the blocks of an asynchronous load when
    the load is over (`v1/core/sched/scheduler.py`, 0.32, `_update_waiting_for_remote_kv`). It shares the blocks of a
    load within the step at once, so no request has to wait for loads of this kind.

    A load of a short common prefix is shared too. Without sharing, each conversation of a burst holds its own copy of
    the system prompt. A burst that fits on the device without a connector would then cause preemptions.

    `end_token` is the token at which the request's own load would end. vLLM has `num_computed_tokens` tokens of the
    request now.
    """
    if not projections.configuration.awaits_shared_loads:
        return None
    best, best_end = None, num_computed_tokens
    for load in projections.jobs.async_loads.values():
        if load.ordinal != request.ordinal and _will_be_shared(load, projections):
            shared_end = min(_shared_end(load, num_computed_tokens, request, projections), end_token)
            if shared_end > best_end:
                best, best_end = load, shared_end
    return best


def _will_be_shared(load: Copy, projections: Projections) -> bool:
    """Whether the load's blocks will be in vLLM's prefix cache, as far as kvledger knows."""
    owner = projections.tracker.of(load.ordinal)
    return (
        not load.ranks_failed
        and projections.jobs.is_current(load)
        and owner is not None
        and owner.generation == load.generation
        and owner.state is not RequestState.FINISHED  # vLLM frees the blocks of an aborted request
    )


def _shared_end(load: Copy, num_computed_tokens: int, request: RequestRecord, projections: Projections) -> int:
    """Return up to which token the request can share the loaded blocks; 0 if it cannot share any.

    The result is a multiple of the block size.
    """
    geometry, keys = projections.geometry, request.keys
    first = num_computed_tokens // geometry.chunk_size
    if not load.chunks or load.chunks[0] > first:
        return 0
    offset = first - load.chunks[0]
    num_theirs = len(load.keys) - offset
    places = range(min(num_theirs, len(keys) - first))
    # A key hashes everything before it, so equal keys come first.
    num_shared = bisect_left(places, 1, key=lambda place: load.keys[offset + place] != keys[first + place])
    if num_shared <= 0 or (geometry.windows.has_any and num_shared < num_theirs):
        return 0  # a load leaves out pages that windows see only after an earlier boundary
    num_tokens = (first + num_shared) * geometry.chunk_size
    return num_tokens - num_tokens % geometry.block_size
