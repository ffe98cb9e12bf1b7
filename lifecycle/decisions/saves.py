"""Which settled chunks to save, into which slots, and who has to make room.

Only settled tokens are saved: what a running step may still write, or a rejected draft take back, is not
there yet. Chunks that are saved or being saved already cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.decisions import NOTHING, Decisions
from kvledger.lifecycle.decisions.reach import Reach
from kvledger.lifecycle.decisions.reports import ask_after
from kvledger.lifecycle.projections.host_slots import NO_SLOT
from kvledger.lifecycle.projections.tracker import RequestRecord
from kvledger.lifecycle.rules import Rule
from kvledger.lifecycle.windows import NULL_BLOCK, blocks_at


def save_settled(
    record: RequestRecord, first_chunk: int, num_settled_tokens: int, projections: Projections, cause: int
) -> Decisions:
    """Save the chunks from `first_chunk` on that are settled, from the blocks the request holds."""
    if projections.transfers.is_loading(record.ordinal):
        return NOTHING
    block_ids = projections.blocks.of_life(record.ordinal) or ()
    forget = projections.geometry.windows.forget
    is_async = projections.configuration.async_saves and not forget
    left_since = projections.blocks.left_since(record.request_id) if forget else None
    plan = _Plan(record, record.generation, block_ids, projections, cause, False, is_async, left_since)  # noqa: FBT003
    return plan.save(first_chunk, num_settled_tokens)


def save_on_preemption(
    event: e.RequestPreempted, record: RequestRecord, projections: Projections, cause: int
) -> Decisions:
    """Save what is settled and not saved from the blocks that were just taken: whole chunks, and the tail.

    The next step may overwrite these blocks, so it waits for the copies out of them, also for those under way.
    """
    yield from fence_saves(record, projections, cause)
    # The record is one generation further already; the blocks belong to the one before.
    if projections.transfers.is_loading(record.ordinal):
        return
    plan = _plan_from_lost(record, record.generation - 1, projections, cause, before_forward=True, is_async=False)
    yield from plan.save(0, event.num_settled_tokens)
    if projections.configuration.save_tails:
        yield from plan.save_tail(event.num_settled_tokens)


def fence_saves(record: RequestRecord, projections: Projections, cause: int) -> Decisions:
    """Let the next step wait for copies out of blocks that it may overwrite."""
    jobs = projections.transfers.reads_blocks_of(record.ordinal)
    if not jobs:
        return NOTHING
    return iter(tuple([asked for job in jobs for asked in ask_after(job, cause, before_forward=True)]))


def save_on_finish(event: e.RequestFinished, record: RequestRecord, projections: Projections, cause: int) -> Decisions:
    """Save what is settled and not saved when the request ends, for those who will ask for its prefix.

    Blocks that a copy still reads are kept from being freed.
    """
    if projections.transfers.is_loading_beside(record.ordinal):
        return NOTHING
    # A load within its last step has come in before anything was computed; where it turns out to have failed, so does
    # the save. The last sampled token was never computed: its place in the last block was never written (vllm#54193).
    # What no step has computed upon may be the promise of a load that failed.
    num_computed_tokens = projections.tracker.num_computed_tokens(record)
    num_written = min(event.num_settled_tokens, event.num_tokens - 1, num_computed_tokens)
    is_async = _is_async(projections)
    plan = _plan_from_lost(
        record,
        record.generation,
        projections,
        cause,
        before_forward=not is_async,
        is_async=is_async,
        left_since=projections.blocks.left_at_end(record.request_id),
    )
    saves = plan.save(0, num_written)
    if saves is NOTHING and not projections.transfers.reads_blocks_of(record.ordinal):
        return NOTHING
    return _hold_what_is_read(saves, record, projections, cause)


def _hold_what_is_read(saves: Decisions, record: RequestRecord, projections: Projections, cause: int) -> Decisions:
    yield from saves
    if projections.transfers.reads_blocks_of(record.ordinal):
        yield e.BlocksHeld(request_id=record.request_id, generation=record.generation, cause=cause)


def _is_async(projections: Projections) -> bool:
    # Pages that leave a window are freed without a word, so a copy out of them must not outlast its step.
    return projections.configuration.async_saves and not projections.geometry.windows.forget


def _plan_from_lost(
    record: RequestRecord,
    generation: int,
    projections: Projections,
    cause: int,
    *,
    before_forward: bool,
    is_async: bool,
    left_since: int | None = None,
) -> _Plan:
    return _Plan(
        record,
        generation,
        projections.blocks.lost(record.request_id),
        projections,
        cause,
        before_forward=before_forward,
        is_async=is_async,
        left_since=left_since,
    )


class _Plan(msgspec.Struct):
    """One save of one request."""

    record: RequestRecord
    generation: int
    block_ids: Sequence[int]
    projections: Projections
    cause: int
    before_forward: bool
    is_async: bool
    left_since: int | None = None

    @property
    def _is_doubtful(self) -> bool:
        record = self.record
        if record.quarantined or self.generation == record.stale_generation:
            return True
        return self.projections.unfilled.spoil(self.block_ids)

    def save(self, first_chunk: int, num_settled_tokens: int) -> Decisions:
        """Evict what is needed, issue one job, decline what does not fit."""
        record, projections = self.record, self.projections
        if self._is_doubtful:
            return NOTHING
        geometry, chunks = projections.geometry, projections.chunks
        keys = projections.chunk_keys.of(record.request_id)
        end_chunk = num_settled_tokens // geometry.chunk_size
        if end_chunk > len(keys):  # noqa: PLR1730 -- a call to `min` costs more, for every save
            end_chunk = len(keys)
        if geometry.windows.forget:
            reach = self._reach(num_settled_tokens, end_chunk)
            wanted = self._missing(keys, first_chunk, end_chunk, reach)
            return self._save_as_fits(wanted, keys[:end_chunk], reach) if wanted else NOTHING
        unsaved: Sequence[int]
        if end_chunk - first_chunk == 1:  # as in nearly every step
            key = keys[first_chunk]
            unsaved = () if chunks.get(key) is not None or chunks.is_saving(key) else (first_chunk,)
        else:
            unsaved = chunks.unsaved(keys, first_chunk, end_chunk)
        if not unsaved:
            return NOTHING
        block_ids = self._blocks_of(unsaved)
        slots = chunks.slots.candidates(len(block_ids))
        if not block_ids or len(slots) < len(block_ids):
            wanted = [(chunk, geometry.pages_of((chunk,))) for chunk in unsaved]
            return self._save_as_fits(wanted, keys[:end_chunk], None)
        issued = e.SaveIssued(
            record.request_id,
            self.generation,
            projections.transfers.next_job_id,
            tuple(unsaved),
            slots,
            block_ids,
            self.before_forward,
            self.is_async,
            self.cause,
        )
        return iter((issued,))

    def _blocks_of(self, chunks: Sequence[int]) -> tuple[int, ...]:
        """The blocks of the chunks' pages in all groups; () where the table ends before."""
        table, geometry = self.block_ids, self.projections.geometry
        num_pages = geometry.pages_per_chunk
        first, num_chunks = chunks[0], len(chunks)
        if num_pages and chunks[-1] - first < num_chunks:  # in a row, as nearly always: one piece of the table
            end = (first + num_chunks) * num_pages
            if end > len(table):
                return ()
            return (table[end - 1],) if num_pages == num_chunks == 1 else tuple(table[first * num_pages : end])
        pages = geometry.pages_of(chunks)
        return blocks_at(pages, table) if pages[-1] < len(table) else ()

    def _save_as_fits(
        self, wanted: Sequence[tuple[int, Sequence[int]]], own_keys: Sequence[bytes], reach: Reach | None
    ) -> Decisions:
        last_chunk, last_pages = wanted[-1]
        if last_pages[-1] >= len(self.block_ids):
            detail = f"chunk {last_chunk} is settled, but the table has only {len(self.block_ids)} blocks"
            request_id = self.record.request_id
            yield e.InvariantViolated(Rule.TABLE_EQ.value, request_id, detail, self.cause)
            yield e.RequestQuarantined(request_id=request_id, reason=Rule.TABLE_EQ.value, cause=self.cause)
            return
        chunks: list[int] = []
        affordable: dict[int, None] = {}
        for chunk, pages in wanted:
            num_pages = len(affordable) + len(pages)
            if not self.projections.geometry.pages_per_chunk:  # chunks may share the page of a block
                num_pages -= sum([page in affordable for page in pages])
            if self.projections.chunks.slots.num_free < num_pages:
                yield from self._make_room(num_pages, own_keys)
            if self.projections.chunks.slots.num_free < num_pages:
                break
            chunks.append(chunk)
            affordable.update(dict.fromkeys(pages))
        if chunks:
            yield self._job(tuple(chunks), affordable, reach)
        if len(chunks) < len(wanted):
            yield self._declined(wanted[len(chunks)][0], len(wanted) - len(chunks))

    def _reach(self, num_settled_tokens: int, end_chunk: int = 0) -> Reach:
        junction = self.projections.lookups.junction(self.record.request_id)
        boundaries = (end_chunk * self.projections.geometry.chunk_size, min(junction, num_settled_tokens))
        return Reach(self.projections.geometry.windows, num_settled_tokens, self.left_since, boundaries)

    def _missing(
        self, keys: Sequence[bytes], first_chunk: int, end_chunk: int, reach: Reach
    ) -> list[tuple[int, Sequence[int]]]:
        return [
            (chunk, pages)
            for chunk in range(first_chunk, end_chunk)
            if not self.projections.chunks.is_saving(keys[chunk])
            and (pages := self._missing_pages(chunk, keys[chunk], reach))
        ]

    def _missing_pages(self, chunk: int, key: bytes, reach: Reach) -> Sequence[int]:
        """The pages of a chunk that are not stored and can be, ascending.

        Of a chunk that is stored these are pages of groups with a window: whoever saved it did not see them any more.
        """
        stored = self.projections.chunks.get(key)
        if stored is not None and NO_SLOT not in stored:
            return ()
        pages = self.projections.geometry.pages_of((chunk,))
        slots = stored or (NO_SLOT,) * len(pages)
        return tuple(
            page
            for page, slot in zip(pages, slots, strict=True)
            if slot == NO_SLOT and reach.keeps(page, self.block_ids)
        )

    def save_tail(self, num_settled_tokens: int) -> Decisions:
        """Save the tokens behind the last whole chunk, where everything before them is saved or being saved."""
        end_chunk = self.projections.geometry.num_chunks_in(num_settled_tokens)
        first_token = end_chunk * self.projections.geometry.chunk_size
        keys = self.projections.chunk_keys.of(self.record.request_id)[:end_chunk]
        if self._is_doubtful or first_token == num_settled_tokens or len(keys) < end_chunk:
            return
        if not all(
            self.projections.chunks.get(key) is not None or self.projections.chunks.is_saving(key) for key in keys
        ):
            return
        pages = self.projections.geometry.pages_spanning(first_token, num_settled_tokens - first_token)
        if pages.stop > len(self.block_ids):
            return
        reach = self._reach(num_settled_tokens)
        kept = dict.fromkeys(page for page in pages if reach.keeps(page, self.block_ids))
        yield from self._make_room(len(kept), keys)
        if self.projections.chunks.slots.num_free < len(kept):
            yield self._declined(end_chunk, 1)
            return
        slots, block_ids = self._pairs(pages, kept)
        yield e.TailSaveIssued(
            request_id=self.record.request_id,
            generation=self.generation,
            job_id=self.projections.transfers.next_job_id,
            first_token=first_token,
            num_tokens=num_settled_tokens - first_token,
            slots=slots,
            block_ids=block_ids,
            cause=self.cause,
        )

    def _pairs(self, pages: Sequence[int], kept: Mapping[int, None]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Slots and blocks for pages, with `NO_SLOT` and `NULL_BLOCK` for those that are not to be copied."""
        free = iter(self.projections.chunks.slots.candidates(len(kept)))
        slots = tuple(next(free) if page in kept else NO_SLOT for page in pages)
        return slots, tuple(self.block_ids[page] if page in kept else NULL_BLOCK for page in pages)

    def _make_room(self, num_pages: int, own_keys: Sequence[bytes]) -> Decisions:
        num_missing = num_pages - self.projections.chunks.slots.num_free
        if num_missing > 0:
            # Its own beginning is worth more than its own end.
            for victim in self.projections.chunks.room_for(num_missing, spare=frozenset(own_keys)) or ():
                yield e.ChunkEvicted(victim, self.record.request_id, self.cause)

    def _job(self, chunks: tuple[int, ...], kept: Mapping[int, None], reach: Reach | None) -> e.SaveIssued:
        pages = self.projections.geometry.pages_of(chunks)
        if reach is None:  # every page is kept
            slots, block_ids = self.projections.chunks.slots.candidates(len(pages)), blocks_at(pages, self.block_ids)
        else:
            slots, block_ids = self._pairs(pages, kept)
        return e.SaveIssued(
            request_id=self.record.request_id,
            generation=self.generation,
            job_id=self.projections.transfers.next_job_id,
            chunks=chunks,
            slots=slots,
            block_ids=block_ids,
            before_forward=self.before_forward or (reach is not None and any(map(reach.has_left, kept))),
            is_async=self.is_async,
            cause=self.cause,
        )

    def _declined(self, first_chunk: int, num_chunks: int) -> e.SaveDeclined:
        return e.SaveDeclined(
            request_id=self.record.request_id,
            generation=self.generation,
            first_chunk=first_chunk,
            num_chunks=num_chunks,
            reason="pool_full",
            cause=self.cause,
        )
