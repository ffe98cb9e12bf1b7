"""Whether another request is loading what this one would load.

A burst of requests with one long prefix would load it once for each of them and fill the device with copies
(vllm#29087). vLLM's prefix cache shares the blocks of an asynchronous load as soon as the load has ended
(`v1/core/sched/scheduler.py`, 0.32, `_update_waiting_for_remote_kv`). It shares those of a load within the step at
once, so nobody has to wait for them.
"""

from __future__ import annotations

from bisect import bisect_left

from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.projections.transfers import Job
from kvledger.lifecycle.states import RequestState


def shared_load(
    end_token: int, num_computed_tokens: int, record: RequestRecord, projections: Projections
) -> Job | None:
    """Return another request's load that brings blocks which this request would load, or None.

    A short common beginning counts, too. If it is not shared, each conversation of a burst holds a system prompt of its
    own, and a burst that fits without a connector causes preemptions.

    Args:
        end_token: tokens that the request would have after a load of its own.
        num_computed_tokens: tokens that vLLM has for it now.
        record: the request.
        projections: what is known.
    """
    loads = projections.transfers.async_loads
    if not loads or not projections.configuration.awaits_shared_loads or end_token <= num_computed_tokens:
        return None
    best, best_end = None, num_computed_tokens
    for job in loads.values():
        if job.ordinal != record.ordinal and _will_be_shared(job, projections):
            shared_end = min(_shared_end(job, num_computed_tokens, record, projections), end_token)
            if shared_end > best_end:
                best, best_end = job, shared_end
    return best


def _will_be_shared(load: Job, projections: Projections) -> bool:
    """Whether the load's blocks come into vLLM's prefix cache, as far as is known."""
    owner = projections.tracker.of(load.ordinal)
    return (
        not load.ranks_failed
        and projections.transfers.is_current(load)
        and owner is not None
        and owner.generation == load.generation
        and owner.state is not RequestState.FINISHED  # vLLM frees the blocks of an aborted request
    )


def _shared_end(load: Job, num_computed_tokens: int, record: RequestRecord, projections: Projections) -> int:
    """Return the tokens up to where the load brings what the request lacks, in whole blocks; 0 if it brings nothing."""
    geometry, keys = projections.geometry, record.keys
    first = num_computed_tokens // geometry.chunk_size
    if not load.chunks or load.chunks[0] > first:
        return 0
    offset = first - load.chunks[0]
    num_theirs = len(load.keys) - offset
    places = range(min(num_theirs, len(keys) - first))
    # A key hashes all before it, so those that are equal come first.
    num_shared = bisect_left(places, 1, key=lambda place: load.keys[offset + place] != keys[first + place])
    if num_shared <= 0 or (geometry.windows.forget and num_shared < num_theirs):
        return 0  # behind an earlier boundary a load leaves out what windows see
    num_tokens = (first + num_shared) * geometry.chunk_size
    return num_tokens - num_tokens % geometry.block_size
