"""Whether to load when blocks are given, and which slots into which blocks.

`num_external_tokens` of the allocation is the scheduler's word, and may be less than was answered, also 0.
"""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.decisions.boundaries import slot_of_page
from kvledger.lifecycle.events import NO_SLOT, NULL_BLOCK
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.rules import Rule
from kvledger.lifecycle.turn import Turn


def load_what_was_answered(turn: Turn, event: e.BlocksAllocated) -> None:
    """Issue the load that the allocation accepts, or record why it cannot be delivered."""
    if not event.num_external_tokens:
        return
    record, projections = turn.record, turn.projections
    answer = record.claimed
    if answer is None or answer.generation != record.generation:
        _refuse(turn, Rule.ALLOC_MATCHES_LOOKUP, "tokens were claimed that no lookup answered")
        return
    if event.num_external_tokens > answer.num_external_tokens:
        detail = f"{event.num_external_tokens} tokens were claimed, {answer.num_external_tokens} had been answered"
        _refuse(turn, Rule.ALLOC_MATCHES_LOOKUP, detail)
        return
    first_token, num_tokens = answer.num_computed_tokens, event.num_external_tokens
    pages = projections.geometry.pages_spanning(first_token, num_tokens)
    if first_token < 0 or pages.stop > len(event.block_ids):
        detail = f"tokens to {first_token + num_tokens} need {pages.stop} blocks, {len(event.block_ids)} were given"
        _refuse(turn, Rule.TABLE_EQ, detail)
        return
    block_ids = event.block_ids[pages.start : pages.stop]
    find_slots = _slots_seen if projections.geometry.windows.forget else _slots_for
    slots = find_slots(pages, block_ids, first_token + num_tokens, record, projections)
    if slots is None:
        detail = f"tokens to {first_token + num_tokens} were promised, not all of their chunks are there"
        _refuse(turn, Rule.LOADABLE_AFTER_COMMIT, detail)
        return
    turn.decide(
        e.LoadIssued(
            request_id=record.request_id,
            ordinal=record.ordinal,
            generation=record.generation,
            job_id=projections.transfers.next_job_id,
            first_token=first_token,
            num_tokens=num_tokens,
            slots=slots,
            block_ids=block_ids,
            is_async=answer.is_async,
            cause=turn.cause,
        )
    )


def _slots_seen(
    pages: range, block_ids: tuple[int, ...], end_token: int, record: RequestRecord, projections: Projections
) -> tuple[int, ...] | None:
    """The slots of the pages that have a block, `NO_SLOT` for the others; None where a page has a block but no slot.

    vLLM gives a group with a window no blocks for what the next token does not see.
    """
    sizes = projections.geometry.window_sizes
    slots = []
    for page, block_id in zip(pages, block_ids, strict=True):
        is_seen = block_id != NULL_BLOCK or not sizes[page % len(sizes)]
        slot = slot_of_page(page, end_token, record, projections) if is_seen else NO_SLOT
        if is_seen and slot == NO_SLOT:
            return None
        slots.append(slot)
    return tuple(slots)


def _slots_for(
    pages: range, _block_ids: tuple[int, ...], end_token: int, record: RequestRecord, projections: Projections
) -> tuple[int, ...] | None:
    """The slot with the longest image of each page: whole chunks where they reach, else chunks and the tail."""
    of_chunks = _slots_of_chunks(pages, end_token, record, projections)
    if of_chunks is not None:
        return of_chunks
    tail = record.saved_tail
    if tail is None or tail.end_token < end_token:
        return None
    first_of_tail = projections.geometry.pages_spanning(tail.first_token, 1).start
    before = range(pages.start, max(pages.start, first_of_tail))
    of_chunks = _slots_of_chunks(before, tail.first_token, record, projections)
    if of_chunks is None:
        return None
    return of_chunks + tuple(tail.slots[page - first_of_tail] for page in range(before.stop, pages.stop))


def _slots_of_chunks(
    pages: range, end_token: int, record: RequestRecord, projections: Projections
) -> tuple[int, ...] | None:
    geometry = projections.geometry
    num_chunks = -(-end_token // geometry.chunk_size)
    keys = record.keys[:num_chunks]
    slots_of_chunk = [slots for key in keys if (slots := projections.chunks.get(key)) is not None]
    if len(slots_of_chunk) < num_chunks:
        return None
    if geometry.pages_per_chunk:  # every page lies in one chunk, and all chunks are alike
        first_chunk = pages.start // geometry.pages_per_chunk
        slots_of_pages = [slot for slots_in_order in slots_of_chunk[first_chunk:] for slot in slots_in_order]
        first = pages.start - first_chunk * geometry.pages_per_chunk
        return tuple(slots_of_pages[first : first + len(pages)])
    return tuple(
        slots_of_chunk[chunk][place] for chunk, place in (geometry.place_of(page, num_chunks) for page in pages)
    )


def _refuse(turn: Turn, rule: Rule, detail: str) -> None:
    turn.decide(e.InvariantViolated(rule.value, *turn.record.life, detail, turn.cause))
    turn.decide(e.RequestQuarantined(*turn.record.life, rule.value, turn.cause))
