"""Decides whether to load when a request gets blocks, and which slots to load into which blocks.

`num_external_tokens` of the allocation is the number of tokens that the scheduler claims: at most the offered number,
possibly 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvledger.lifecycle import events as e
from kvledger.lifecycle.decisions.windows import slot_of_page
from kvledger.lifecycle.events import NO_SLOT, NULL_BLOCK
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.rules import Rule
from kvledger.lifecycle.turn import Turn


def load_what_was_answered(turn: Turn, event: e.BlocksAllocated) -> None:
    """Issue the load of the tokens that the allocation claims, or record why they cannot be loaded."""
    if not event.num_external_tokens:
        return
    request, projections = turn.record, turn.projections
    answer = request.claimed
    if answer is None or answer.generation != request.generation:
        _refuse(turn, Rule.ALLOC_MATCHES_LOOKUP, "tokens were claimed that no lookup had offered")
        return
    if event.num_external_tokens > answer.num_external_tokens:
        detail = f"{event.num_external_tokens} tokens were claimed, but {answer.num_external_tokens} had been offered"
        _refuse(turn, Rule.ALLOC_MATCHES_LOOKUP, detail)
        return
    first_token, num_tokens = answer.num_computed_tokens, event.num_external_tokens
    end_token = first_token + num_tokens
    pages = projections.geometry.pages_spanning(first_token, num_tokens)
    if first_token < 0 or pages.stop > len(event.block_ids):
        detail = f"tokens up to {end_token} need {pages.stop} blocks, but {len(event.block_ids)} were given"
        _refuse(turn, Rule.TABLE_EQ, detail)
        return
    block_ids = event.block_ids[pages.start : pages.stop]
    if projections.geometry.windows.has_any:
        slots = _slots_with_windows(pages, block_ids, end_token, request, projections)
    else:
        slots = _slots_of(pages, end_token, request, projections)
    if slots is None:
        detail = f"tokens up to {end_token} were promised, but not all of their chunks are stored"
        _refuse(turn, Rule.LOADABLE_AFTER_COMMIT, detail)
        return
    load = e.LoadIssued(
        request_id=request.request_id,
        ordinal=request.ordinal,
        generation=request.generation,
        job_id=projections.jobs.next_job_id,
        first_token=first_token,
        num_tokens=num_tokens,
        slots=slots,
        block_ids=block_ids,
        is_async=answer.is_async,
        cause=turn.cause,
    )
    turn.decide(load)


def _slots_of(pages: range, end_token: int, request: RequestRecord, projections: Projections) -> tuple[int, ...] | None:
    """Return for each page the slot that holds the most of the page's tokens; None if a page is not stored.

    Use whole chunks if they reach the end of the load. Otherwise use the chunks before the tail, and then the tail.
    """
    slots = _slots_of_chunks(pages, end_token, request, projections)
    tail = request.tail
    if slots is not None or tail is None or not tail.is_saved or tail.end_token < end_token:
        return slots
    first_of_tail = projections.geometry.pages_spanning(tail.first_token, 1).start
    before = range(pages.start, max(pages.start, first_of_tail))
    slots = _slots_of_chunks(before, tail.first_token, request, projections)
    if slots is None:
        return None
    return slots + tuple(tail.slots[page - first_of_tail] for page in range(before.stop, pages.stop))


def _slots_of_chunks(
    pages: range, end_token: int, request: RequestRecord, projections: Projections
) -> tuple[int, ...] | None:
    """Return the slots of these pages, which are in chunks of the request's first `end_token` tokens.

    Return None if one of the pages is not stored.
    """
    geometry, pool = projections.geometry, projections.pool
    num_chunks = geometry.num_chunks_touched(end_token)
    slots = pool.slots_of(request.keys[:num_chunks]) if num_chunks <= len(request.keys) else None
    return None if slots is None else geometry.slots_of_pages(pages, slots)


def _slots_with_windows(
    pages: range, block_ids: Sequence[int], end_token: int, request: RequestRecord, projections: Projections
) -> tuple[int, ...] | None:
    """Return the slot of each page that has a block, else `NO_SLOT`; None if a page with a block is not stored.

    In a group with a window, vLLM gives no blocks for pages that the next token does not see.
    """
    sizes = projections.geometry.window_sizes
    slots = []
    for page, block_id in zip(pages, block_ids, strict=True):
        is_seen = block_id != NULL_BLOCK or not sizes[page % len(sizes)]
        slot = slot_of_page(page, end_token, request, projections) if is_seen else NO_SLOT
        if is_seen and slot == NO_SLOT:
            return None
        slots.append(slot)
    return tuple(slots)


def _refuse(turn: Turn, rule: Rule, detail: str) -> None:
    """Record the broken rule, and quarantine the request."""
    turn.decide(e.InvariantViolated(rule.value, *turn.record.life, detail, turn.cause))
    turn.decide(e.RequestQuarantined(*turn.record.life, rule.value, turn.cause))
