"""What to answer when the scheduler asks how much can be loaded.

Pure: any number of lookups equals one. The hit may come from the lookup cache, the answer never does: it is
computed against the `num_computed_tokens` of this very call.
"""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.decisions import Decisions
from kvledger.lifecycle.projections.lookup_cache import MissReason
from kvledger.lifecycle.projections.tracker import RequestRecord


def answer_lookup(event: e.LookupRequested, record: RequestRecord, projections: Projections, cause: int) -> Decisions:
    """Answer with the usable hit beyond what is computed, leaving the last token to compute."""
    num_hit_chunks = projections.lookups.num_hit_chunks(event.request_id, record.generation)
    num_hit_tokens = num_hit_chunks * projections.configuration.chunk_size
    reason, reason_sequence = _why_it_ends(event.request_id, num_hit_chunks, projections)
    tail = projections.tails.saved(record.ordinal)
    if tail is not None and tail.first_token == num_hit_tokens:
        num_hit_tokens = tail.end_token
        if num_hit_tokens >= event.num_tokens - 1:
            reason, reason_sequence = MissReason.COMPLETE, 0
    usable = projections.policy.usable_tokens(num_hit_tokens, record)
    if usable < num_hit_tokens:
        reason, reason_sequence = MissReason.LIMITED, 0
    if record.quarantined:
        usable, reason, reason_sequence = 0, MissReason.QUARANTINED, 0
    # Whole pages are loaded, so a load must start on a block boundary. vLLM presents a block-aligned local hit
    # (v1/core/sched/scheduler.py, 0.32); anything else is answered with nothing.
    aligned = event.num_computed_tokens % projections.configuration.block_size == 0
    beyond = min(usable, event.num_tokens - 1) - event.num_computed_tokens
    yield e.LookupAnswered(
        request_id=event.request_id,
        generation=record.generation,
        num_computed_tokens=event.num_computed_tokens,
        num_tokens=event.num_tokens,
        num_hit_tokens=num_hit_tokens,
        num_external_tokens=max(0, beyond) if aligned else 0,
        miss_reason=reason.value,
        miss_cause=reason_sequence,
        cause=cause,
    )


def _why_it_ends(request_id: str, num_hit_chunks: int, projections: Projections) -> tuple[MissReason, int]:
    keys = projections.chunk_keys.of(request_id)
    if num_hit_chunks >= len(keys):
        return MissReason.COMPLETE, 0
    missing = keys[num_hit_chunks]
    if projections.chunks.is_saving(missing):
        return MissReason.SAVING, 0
    departed = projections.chunks.departed(missing)
    if departed is not None:
        return MissReason(departed.reason.value), departed.sequence
    return MissReason.NEVER_SAVED, 0
