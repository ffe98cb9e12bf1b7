"""Decides which settled chunks to save, into which slots, and which chunks to evict to make room.

Only settled tokens are saved. A step in flight may be writing the other tokens, or vLLM may reject them as drafts.
kvledger saves tokens of a request on three occasions:

- Chunks settle while the request computes: `save_settled`.
- vLLM preempts the request: `save_on_preemption`. The next step may overwrite the blocks that the request lost.
- The request ends: `save_on_finish`. Other requests may ask for its prefix.

On each occasion, a `Source` describes the blocks to copy from. `plan_save` and `plan_tail` choose the pages to copy and
the chunks to evict, but decide nothing. `save_from` and `save_tail_from` then decide evictions and saves, and decline
the chunks for which there is no room.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.decisions.reports import ask_after
from kvledger.lifecycle.decisions.windows import SavablePages
from kvledger.lifecycle.events import NO_SLOT, NULL_BLOCK
from kvledger.lifecycle.geometry import Geometry, blocks_at
from kvledger.lifecycle.projections.pool import Pool, num_intact_tokens
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.projections.unfilled import UnfilledBlocks
from kvledger.lifecycle.rules import Rule
from kvledger.lifecycle.states import BlocksRegion, CurrentRegion, TrustRegion
from kvledger.lifecycle.turn import Turn


class Source(msgspec.Struct, frozen=True, gc=False):
    """The blocks that a save copies from."""

    block_ids: Sequence[int]
    savable: SavablePages | None
    """The pages that can be copied; None: all, because no group of layers has a window."""
    num_settled_tokens: int
    generation: int
    """The request's generation in which the blocks were computed."""
    is_async: bool
    """Whether a copy may outlast its step. With windows, no copy may, as vLLM frees pages while the request runs."""
    is_lost: bool
    """Whether the next forward pass may overwrite the blocks. If so, a copy within the step must precede that pass."""


class Declined(msgspec.Struct, frozen=True, gc=False):
    """Settled chunks that are not saved."""

    first_chunk: int
    num_chunks: int
    reason: str


class TableTooShort(msgspec.Struct, frozen=True, gc=False):
    """A settled chunk has no block: the token count and the block table cannot both be right."""

    chunk: int


class Save(msgspec.Struct, frozen=True, gc=False):
    """Chunks to copy into free slots."""

    chunks: Sequence[int]
    pages: Sequence[int]
    """Pages to copy, ascending. With windows, possibly only some pages of the chunks."""
    evicted: Sequence[bytes] = ()
    """Keys of the chunks to evict before the copy."""
    rest: Declined | None = None
    """The remaining settled chunks, for which there is no room; None if there is room for all."""


class TailSave(msgspec.Struct, frozen=True, gc=False):
    """Tokens after the last whole chunk, to be copied into free slots."""

    first_token: int
    num_tokens: int
    pages: Sequence[int]
    """Pages to copy, ascending. With windows, possibly only some pages of the tokens."""
    evicted: Sequence[bytes] = ()
    """Keys of the chunks to evict before the copy."""


# --- the three occasions -----------------------------------------------------------------------


def save_settled(turn: Turn, first_chunk: int, num_settled_tokens: int) -> None:
    """Save settled chunks, beginning with `first_chunk`. Copy them from the blocks that the request holds."""
    request, projections = turn.record, turn.projections
    if request.blocks is BlocksRegion.LOADING or _is_doubtful(request, request.current):
        return
    table, freed_at = request.block_ids or (), request.window_freed_before_step
    savable = savable_pages(request, projections.geometry, table, num_settled_tokens, freed_at)
    source = Source(
        table,
        savable,
        num_settled_tokens,
        request.generation,
        is_async=projections.configuration.async_saves and savable is None,
        is_lost=False,
    )
    save_from(turn, source, first_chunk)


def save_on_preemption(turn: Turn, event: e.RequestPreempted) -> None:
    """Save settled chunks that are not saved, and the tail, from the blocks that vLLM has just taken.

    The next step may overwrite these blocks. It therefore waits for all copies from them, including copies that are
    already in flight.
    """
    fence_saves(turn)
    request, before, projections = turn.record, turn.before, turn.projections
    if before.blocks is BlocksRegion.LOADING or _is_doubtful(request, before.current):
        return
    table, num_settled_tokens = request.lost_block_ids or (), num_intact_tokens(event)
    source = Source(
        table,
        savable_pages(request, projections.geometry, table, num_settled_tokens, None),
        num_settled_tokens,
        before.generation,  # the record has the next generation already
        is_async=False,
        is_lost=True,
    )
    save_from(turn, source, 0)
    if projections.configuration.save_tails:
        save_tail_from(turn, source)


def save_on_finish(turn: Turn, event: e.RequestFinished) -> None:
    """When the request ends, save its settled chunks that are not saved, for later requests with the same prefix.

    If a copy reads the request's blocks, vLLM keeps them until the copy is done.
    """
    request, projections = turn.record, turn.projections
    if projections.jobs.is_loading_async(request.ordinal, request.generation):
        return
    if not _is_doubtful(request, turn.before.current):
        table, num_written_tokens = request.lost_block_ids or (), _num_written_tokens(turn, event)
        savable = savable_pages(request, projections.geometry, table, num_written_tokens, request.window_freed_at)
        is_async = projections.configuration.async_saves and savable is None
        source = Source(table, savable, num_written_tokens, request.generation, is_async=is_async, is_lost=not is_async)
        save_from(turn, source, 0)
    if projections.jobs.reads_blocks_of(request.ordinal):
        turn.decide(e.BlocksHeld(*request.life, turn.cause))


def fence_saves(turn: Turn) -> None:
    """Make the next step wait for copies from blocks that the next step may overwrite."""
    for job in turn.projections.jobs.reads_blocks_of(turn.record.ordinal):
        ask_after(turn, job, before_forward=True)


def _is_doubtful(request: RequestRecord, current: CurrentRegion) -> bool:
    """Whether the request's computed tokens may be wrong, or were computed before a reset."""
    return request.trust is TrustRegion.QUARANTINED or current is CurrentRegion.STALE


def savable_pages(
    request: RequestRecord,
    geometry: Geometry,
    block_ids: Sequence[int],
    num_settled_tokens: int,
    window_freed_at: int | None,
) -> SavablePages | None:
    """Return the pages of this block table that a save can copy; None: all pages, because no group has a window.

    The saved pages should let a load end after the last whole chunk. They should also let a load end at the boundary
    that an earlier lookup of this request could not use because pages were missing.
    """
    if not geometry.windows.has_any:
        return None
    num_chunks = min(num_settled_tokens // geometry.chunk_size, len(request.keys))
    boundaries = (num_chunks * geometry.chunk_size, min(request.wanted_boundary, num_settled_tokens))
    return SavablePages(geometry.windows, block_ids, num_settled_tokens, window_freed_at, boundaries)


def _num_written_tokens(turn: Turn, event: e.RequestFinished) -> int:
    """Return how many tokens of the ended request are in its blocks.

    - The last sampled token was never computed, so its place in the last block was never written (vllm#54193).
    - Tokens beyond the number of computed tokens do not count: a load that has failed may have left them.
    - Tokens that the last step loads count. If this load fails, the save fails too.
    """
    num_computed_tokens = turn.projections.tracker.num_computed_tokens(turn.record)
    return min(num_intact_tokens(event), event.num_tokens - 1, num_computed_tokens)


# --- plans -------------------------------------------------------------------------------------


def plan_save(
    request: RequestRecord,
    pool: Pool,
    geometry: Geometry,
    unfilled: UnfilledBlocks,
    source: Source,
    first_chunk: int,
) -> Save | Declined | TableTooShort | None:
    """Plan to save the settled chunks from `first_chunk` on; None if each of them is saved or being saved."""
    savable = source.savable
    end_chunk = min(source.num_settled_tokens // geometry.chunk_size, len(request.keys))
    chunks: Sequence[int] = pool.unsaved(request.keys, first_chunk, end_chunk)
    if unfilled.blocks and unfilled.spoil(source.block_ids if savable is None else savable.blocks()):
        return Declined(chunks[0], len(chunks), e.UNFILLED) if chunks else None
    missing: Mapping[int, Sequence[int]] = {}
    if savable is not None:
        missing = _missing_pages(request.keys, pool, geometry, savable, range(first_chunk, end_chunk))
        chunks = tuple(missing)
    if not chunks:
        return None
    pages = _pages_to_copy(chunks, missing, geometry)
    if pages[-1] >= len(source.block_ids):
        return TableTooShort(chunks[-1])
    num_lacking = len(pages) - pool.slots.num_free
    victims = pool.victims(num_lacking, request.keys, end_chunk)
    if victims.num_slots >= num_lacking:
        return Save(chunks, pages, victims.keys)
    num_slots = pool.slots.num_free + victims.num_slots
    num_chunks = bisect_right(
        range(1, len(chunks)), num_slots, key=lambda end: len(_pages_to_copy(chunks[:end], missing, geometry))
    )
    declined = Declined(chunks[num_chunks], len(chunks) - num_chunks, e.POOL_FULL)
    if not num_chunks:
        return declined
    pages = _pages_to_copy(chunks[:num_chunks], missing, geometry)
    victims = pool.victims(len(pages) - pool.slots.num_free, request.keys, end_chunk)
    return Save(chunks[:num_chunks], pages, victims.keys, declined)


def _pages_to_copy(chunks: Sequence[int], missing: Mapping[int, Sequence[int]], geometry: Geometry) -> Sequence[int]:
    """Return the distinct pages to copy for these chunks, ascending.

    `missing`: chunk → its pages to copy. If it is empty, all pages of the chunks are copied.
    """
    if not missing:
        return geometry.pages_of(chunks)
    return sorted({page for chunk in chunks for page in missing[chunk]})


def _missing_pages(
    keys: Sequence[bytes], pool: Pool, geometry: Geometry, savable: SavablePages, chunks: Iterable[int]
) -> Mapping[int, Sequence[int]]:
    """Chunk → its pages that are not stored and can be copied, ascending. Chunks without such pages are left out.

    A stored chunk may lack pages of groups with a window, because the request that saved the chunk no longer saw these
    pages.
    """
    missing = {}
    for chunk in chunks:
        stored = pool.get(keys[chunk])
        if pool.is_saving(keys[chunk]) or (stored is not None and NO_SLOT not in stored):
            continue
        pages = geometry.pages_of((chunk,))
        slots = (NO_SLOT,) * len(pages) if stored is None else stored
        wanted = [page for page, slot in zip(pages, slots, strict=True) if slot == NO_SLOT and page in savable]
        if wanted:
            missing[chunk] = wanted
    return missing


def plan_tail(
    request: RequestRecord, pool: Pool, geometry: Geometry, unfilled: UnfilledBlocks, source: Source
) -> TailSave | Declined | None:
    """Plan to save the tokens after the last whole chunk.

    None in three cases: there are no such tokens; a chunk before them is not saved, so they could not be loaded; their
    blocks are missing or may hold wrong contents.
    """
    num_chunks = geometry.num_chunks_in(source.num_settled_tokens)
    first_token = num_chunks * geometry.chunk_size
    num_tokens = source.num_settled_tokens - first_token
    if not num_tokens or num_chunks > len(request.keys) or pool.unsaved(request.keys, 0, num_chunks):
        return None
    spanned, savable = geometry.pages_spanning(first_token, num_tokens), source.savable
    relied_on = source.block_ids if savable is None else savable.blocks()
    if spanned.stop > len(source.block_ids) or (unfilled.blocks and unfilled.spoil(relied_on)):
        return None
    pages: Sequence[int] = spanned if savable is None else [page for page in spanned if page in savable]
    num_lacking = len(pages) - pool.slots.num_free
    victims = pool.victims(num_lacking, request.keys, num_chunks)
    if victims.num_slots < num_lacking:
        return Declined(num_chunks, 1, e.POOL_FULL)
    return TailSave(first_token, num_tokens, pages, victims.keys)


# --- decisions ---------------------------------------------------------------------------------


def save_from(turn: Turn, source: Source, first_chunk: int) -> None:
    """Save the settled chunks from `first_chunk` on that are not saved. Decline those for which there is no room."""
    projections = turn.projections
    pool, geometry, unfilled = projections.pool, projections.geometry, projections.tracker.unfilled
    plan = plan_save(turn.record, pool, geometry, unfilled, source, first_chunk)
    if plan is None:
        return
    if isinstance(plan, Save):
        _decide_save(turn, source, plan)
    elif isinstance(plan, Declined):
        _decline(turn, source, plan)
    else:
        life = turn.record.life
        detail = f"chunk {plan.chunk} is settled, but the table has only {len(source.block_ids)} blocks"
        turn.decide(e.InvariantViolated(Rule.TABLE_EQ.value, *life, detail, turn.cause))
        turn.decide(e.RequestQuarantined(*life, Rule.TABLE_EQ.value, turn.cause))


def _decide_save(turn: Turn, source: Source, save: Save) -> None:
    """Evict chunks to make room, issue the save, and decline the chunks for which there is no room."""
    _evict(turn, source, save.evicted)
    request, projections, savable = turn.record, turn.projections, source.savable
    slots, block_ids = projections.slots.candidates(len(save.pages)), blocks_at(save.pages, source.block_ids)
    has_freed = False
    if savable is not None:
        pages = projections.geometry.pages_of(save.chunks)
        slots = _with_gaps(pages, save.pages, slots, NO_SLOT)
        block_ids = _with_gaps(pages, save.pages, block_ids, NULL_BLOCK)
        has_freed = any(map(savable.is_freed, save.pages))
    issued = e.SaveIssued(
        request.request_id,
        request.ordinal,
        source.generation,
        projections.jobs.next_job_id,
        tuple(save.chunks),
        slots,
        block_ids,
        before_forward=source.is_lost or has_freed,
        is_async=source.is_async,
        cause=turn.cause,
    )
    turn.decide(issued)
    if save.rest is not None:
        _decline(turn, source, save.rest)


def save_tail_from(turn: Turn, source: Source) -> None:
    """Save the settled tokens after the last whole chunk, if all chunks before them are saved."""
    request, projections = turn.record, turn.projections
    geometry = projections.geometry
    tail = plan_tail(request, projections.pool, geometry, projections.tracker.unfilled, source)
    if isinstance(tail, Declined):
        _decline(turn, source, tail)
    elif tail is not None:
        _evict(turn, source, tail.evicted)
        pages = geometry.pages_spanning(tail.first_token, tail.num_tokens)
        slots, block_ids = projections.slots.candidates(len(tail.pages)), blocks_at(tail.pages, source.block_ids)
        issued = e.TailSaveIssued(
            request.request_id,
            request.ordinal,
            source.generation,
            projections.jobs.next_job_id,
            tail.first_token,
            tail.num_tokens,
            _with_gaps(pages, tail.pages, slots, NO_SLOT),
            _with_gaps(pages, tail.pages, block_ids, NULL_BLOCK),
            turn.cause,
        )
        turn.decide(issued)


def _with_gaps(pages: Sequence[int], copied: Sequence[int], of_copied: Sequence[int], gap: int) -> tuple[int, ...]:
    """Return a value for each page: the slot or block of a page that is copied, `gap` for the others."""
    of_page = dict(zip(copied, of_copied, strict=True))
    return tuple([of_page.get(page, gap) for page in pages])


def _evict(turn: Turn, source: Source, keys: Sequence[bytes]) -> None:
    if keys:
        record = turn.record
        turn.decide(e.ChunksEvicted(tuple(keys), record.request_id, record.ordinal, source.generation, turn.cause))


def _decline(turn: Turn, source: Source, declined: Declined) -> None:
    decision = e.SaveDeclined(
        turn.record.request_id,
        turn.record.ordinal,
        source.generation,
        declined.first_chunk,
        declined.num_chunks,
        declined.reason,
        turn.cause,
    )
    turn.decide(decision)
