"""Which settled chunks to save, into which slots, and what is evicted for them.

Only settled tokens are saved: what a running step may still write, or a rejected draft take back, is not
there yet. Chunks that are saved or being saved already cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.decisions.reach import Reach
from kvledger.lifecycle.decisions.reports import ask_after
from kvledger.lifecycle.events import NO_SLOT, NULL_BLOCK
from kvledger.lifecycle.projections.room import Room
from kvledger.lifecycle.rules import Rule
from kvledger.lifecycle.states import BlocksRegion, CurrentRegion, TrustRegion
from kvledger.lifecycle.turn import Turn
from kvledger.lifecycle.windows import blocks_at


def save_settled(turn: Turn, first_chunk: int, num_settled_tokens: int) -> None:
    """Save the chunks from `first_chunk` on that are settled, from the blocks the request holds."""
    record, projections = turn.record, turn.projections
    if record.blocks is BlocksRegion.LOADING:
        return
    block_ids = record.block_ids or ()
    forget = projections.geometry.windows.forget
    is_async = projections.configuration.async_saves and not forget
    left_since = record.window_freed_before_step if forget else None
    plan = _Plan(turn, record.generation, record.current, block_ids, False, is_async, left_since)  # noqa: FBT003
    plan.save(first_chunk, num_settled_tokens)


def save_on_preemption(turn: Turn, event: e.RequestPreempted) -> None:
    """Save what is settled and not saved from the blocks that were just taken: whole chunks, and the tail.

    The next step may overwrite these blocks, so it waits for the copies out of them, also for those under way.
    """
    fence_saves(turn)
    # The record is one generation further already; the blocks belong to the one before.
    record, before, projections = turn.record, turn.before, turn.projections
    if before.blocks is BlocksRegion.LOADING:
        return
    lost = record.lost_block_ids or ()
    plan = _Plan(turn, before.generation, before.current, lost, before_forward=True, is_async=False)
    plan.save(0, event.num_intact_tokens)
    if projections.configuration.save_tails:
        plan.save_tail(event.num_intact_tokens)


def fence_saves(turn: Turn) -> None:
    """Let the next step wait for copies out of blocks that it may overwrite."""
    for job in turn.projections.transfers.reads_blocks_of(turn.record.ordinal):
        ask_after(turn, job, before_forward=True)


def save_on_finish(turn: Turn, event: e.RequestFinished) -> None:
    """Save what is settled and not saved when the request ends, for those who will ask for its prefix.

    Blocks that a copy still reads are kept from being freed.
    """
    record, projections = turn.record, turn.projections
    if projections.transfers.is_loading_async(record.ordinal, record.generation):
        return
    # A load within its last step has come in before anything was computed; where it turns out to have failed, so does
    # the save. The last sampled token was never computed: its place in the last block was never written (vllm#54193).
    # What no step has computed upon may be the promise of a load that failed.
    num_computed_tokens = projections.tracker.num_computed_tokens(record)
    num_written = min(event.num_intact_tokens, event.num_tokens - 1, num_computed_tokens)
    # Pages that leave a window are freed without a word, so a copy out of them must not outlast its step.
    is_async = projections.configuration.async_saves and not projections.geometry.windows.forget
    lost, left_since = record.lost_block_ids or (), record.window_freed_at
    current = turn.before.current
    _Plan(turn, record.generation, current, lost, not is_async, is_async, left_since).save(0, num_written)
    if projections.transfers.reads_blocks_of(record.ordinal):
        turn.decide(e.BlocksHeld(*record.life, turn.cause))


class _Plan(msgspec.Struct):
    """One save of one request."""

    turn: Turn
    generation: int
    current: CurrentRegion
    block_ids: Sequence[int]
    before_forward: bool
    is_async: bool
    left_since: int | None = None

    @property
    def _is_doubtful(self) -> bool:
        return self.turn.record.trust is TrustRegion.QUARANTINED or self.current is CurrentRegion.STALE

    def _is_spoilt(self, reach: Reach | None) -> bool:
        """Whether the request relies on a block that a load did not fill. What its windows have left it does not."""
        unfilled, table = self.turn.projections.tracker.unfilled, self.block_ids
        if reach is None or not unfilled.blocks:
            return unfilled.spoil(table)
        return unfilled.spoil(block_id for page, block_id in enumerate(table) if reach.keeps(page, table))

    def save(self, first_chunk: int, num_settled_tokens: int) -> None:
        """Evict what is needed, issue one job, decline what does not fit."""
        record, projections = self.turn.record, self.turn.projections
        if self._is_doubtful:
            return
        unsaved: Sequence[int]
        geometry, chunks = projections.geometry, projections.chunks
        keys = record.keys
        end_chunk = num_settled_tokens // geometry.chunk_size
        if end_chunk > len(keys):  # noqa: PLR1730 -- a call to `min` costs more, for every save
            end_chunk = len(keys)
        reach = self._reach(num_settled_tokens, end_chunk) if geometry.windows.forget else None
        if self._is_spoilt(reach):
            unsaved = chunks.unsaved(keys, first_chunk, end_chunk)
            if unsaved:
                self.turn.decide(self._declined(unsaved[0], len(unsaved), e.UNFILLED))
            return
        if reach is not None:
            wanted = self._missing(keys, first_chunk, end_chunk, reach)
            if wanted:
                self._save_as_fits(wanted, keys[:end_chunk], reach)
            return
        if end_chunk - first_chunk == 1:  # as in nearly every step
            key = keys[first_chunk]
            unsaved = () if chunks.get(key) is not None or chunks.is_saving(key) else (first_chunk,)
        else:
            unsaved = chunks.unsaved(keys, first_chunk, end_chunk)
        if not unsaved:
            return
        block_ids = self._blocks_of(unsaved)
        slots = chunks.slots.candidates(len(block_ids))
        if not block_ids or len(slots) < len(block_ids):
            wanted = [(chunk, geometry.pages_of((chunk,))) for chunk in unsaved]
            self._save_as_fits(wanted, keys[:end_chunk], None)
            return
        self._issue(tuple(unsaved), slots, block_ids, self.before_forward)

    def _issue(
        self,
        chunks: tuple[int, ...],
        slots: tuple[int, ...],
        block_ids: tuple[int, ...],
        before_forward: bool,  # noqa: FBT001 -- keywords cost, and every save comes by here
    ) -> None:
        record, job_id = self.turn.record, self.turn.projections.transfers.next_job_id
        issued = e.SaveIssued(
            record.request_id,
            record.ordinal,
            self.generation,
            job_id,
            chunks,
            slots,
            block_ids,
            before_forward,
            self.is_async,
            self.turn.cause,
        )
        self.turn.decide(issued)

    def _blocks_of(self, chunks: Sequence[int]) -> tuple[int, ...]:
        """The blocks of the chunks' pages in all groups; () where the table ends before."""
        table, geometry = self.block_ids, self.turn.projections.geometry
        num_pages = geometry.pages_per_chunk
        first, num_chunks = chunks[0], len(chunks)
        if num_pages and chunks[-1] - first < num_chunks:  # in a row, as nearly always: one piece of the table
            end = (first + num_chunks) * num_pages
            if end > len(table):
                return ()
            return (table[end - 1],) if num_pages == num_chunks == 1 else tuple(table[first * num_pages : end])
        if num_pages and (chunks[-1] + 1) * num_pages > len(table):
            return ()
        pages = geometry.pages_of(chunks)
        return blocks_at(pages, table) if pages[-1] < len(table) else ()

    def _save_as_fits(
        self, wanted: Sequence[tuple[int, Sequence[int]]], own_keys: Sequence[bytes], reach: Reach | None
    ) -> None:
        last_chunk, last_pages = wanted[-1]
        if last_pages[-1] >= len(self.block_ids):
            detail = f"chunk {last_chunk} is settled, but the table has only {len(self.block_ids)} blocks"
            life = self.turn.record.life
            self.turn.decide(e.InvariantViolated(Rule.TABLE_EQ.value, *life, detail, self.turn.cause))
            self.turn.decide(e.RequestQuarantined(*life, Rule.TABLE_EQ.value, self.turn.cause))
            return
        slots = self.turn.projections.chunks.slots
        num_free, room = slots.num_free, None
        chunks: list[int] = []
        evicted: list[bytes] = []
        affordable: dict[int, None] = {}
        for chunk, pages in wanted:
            num_pages = len(affordable) + len(pages)
            if not self.turn.projections.geometry.pages_per_chunk:  # chunks may share the page of a block
                num_pages -= sum([page in affordable for page in pages])
            if num_free < num_pages:
                room = room or self._room(own_keys)
                victims = room.free(num_pages - num_free)
                if victims is None:
                    break
                evicted += victims
                num_free = slots.num_free + room.num_freed
            chunks.append(chunk)
            affordable.update(dict.fromkeys(pages))
        self._evict(evicted)
        if chunks:
            self._issue_kept(tuple(chunks), affordable, reach)
        if len(chunks) < len(wanted):
            self.turn.decide(self._declined(wanted[len(chunks)][0], len(wanted) - len(chunks)))

    def _reach(self, num_settled_tokens: int, end_chunk: int = 0) -> Reach:
        junction = self.turn.record.junction
        boundaries = (end_chunk * self.turn.projections.geometry.chunk_size, min(junction, num_settled_tokens))
        return Reach(self.turn.projections.geometry.windows, num_settled_tokens, self.left_since, boundaries)

    def _missing(
        self, keys: Sequence[bytes], first_chunk: int, end_chunk: int, reach: Reach
    ) -> list[tuple[int, Sequence[int]]]:
        return [
            (chunk, pages)
            for chunk in range(first_chunk, end_chunk)
            if not self.turn.projections.chunks.is_saving(keys[chunk])
            and (pages := self._missing_pages(chunk, keys[chunk], reach))
        ]

    def _missing_pages(self, chunk: int, key: bytes, reach: Reach) -> Sequence[int]:
        """The pages of a chunk that are not stored and can be, ascending.

        Of a chunk that is stored these are pages of groups with a window: whoever saved it did not see them any more.
        """
        stored = self.turn.projections.chunks.get(key)
        if stored is not None and NO_SLOT not in stored:
            return ()
        geometry = self.turn.projections.geometry
        # Behind the table one block of each group shows that it is too short.
        end = max(len(self.block_ids) - chunk * geometry.pages_per_chunk, 0) + len(geometry.window_sizes)
        pages = geometry.pages_of((chunk,))[:end]
        slots = (NO_SLOT,) * len(pages) if stored is None else stored[:end]
        return tuple(
            page
            for page, slot in zip(pages, slots, strict=True)
            if slot == NO_SLOT and reach.keeps(page, self.block_ids)
        )

    def save_tail(self, num_settled_tokens: int) -> None:
        """Save the tokens behind the last whole chunk, where everything before them is saved or being saved."""
        end_chunk = self.turn.projections.geometry.num_chunks_in(num_settled_tokens)
        first_token = end_chunk * self.turn.projections.geometry.chunk_size
        keys = self.turn.record.keys[:end_chunk]
        if self._is_doubtful or first_token == num_settled_tokens or len(keys) < end_chunk:
            return
        if not all(
            self.turn.projections.chunks.get(key) is not None or self.turn.projections.chunks.is_saving(key)
            for key in keys
        ):
            return
        pages = self.turn.projections.geometry.pages_spanning(first_token, num_settled_tokens - first_token)
        if pages.stop > len(self.block_ids):
            return
        reach = self._reach(num_settled_tokens)
        if self._is_spoilt(reach):
            return
        kept = dict.fromkeys(page for page in pages if reach.keeps(page, self.block_ids))
        self._make_room(len(kept), keys)
        if self.turn.projections.chunks.slots.num_free < len(kept):
            self.turn.decide(self._declined(end_chunk, 1))
            return
        slots, block_ids = self._pairs(pages, kept)
        self.turn.decide(
            e.TailSaveIssued(
                request_id=self.turn.record.request_id,
                ordinal=self.turn.record.ordinal,
                generation=self.generation,
                job_id=self.turn.projections.transfers.next_job_id,
                first_token=first_token,
                num_tokens=num_settled_tokens - first_token,
                slots=slots,
                block_ids=block_ids,
                cause=self.turn.cause,
            )
        )

    def _pairs(self, pages: Sequence[int], kept: Mapping[int, None]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Slots and blocks for pages, with `NO_SLOT` and `NULL_BLOCK` for those that are not to be copied."""
        free = iter(self.turn.projections.chunks.slots.candidates(len(kept)))
        slots = tuple(next(free) if page in kept else NO_SLOT for page in pages)
        return slots, tuple(self.block_ids[page] if page in kept else NULL_BLOCK for page in pages)

    def _make_room(self, num_pages: int, own_keys: Sequence[bytes]) -> None:
        num_missing = num_pages - self.turn.projections.chunks.slots.num_free
        if num_missing > 0:
            self._evict(self._room(own_keys).free(num_missing) or ())

    def _room(self, own_keys: Sequence[bytes]) -> Room:
        # Its own beginning is worth more than its own end.
        projections = self.turn.projections
        return projections.chunks.room(frozenset(own_keys), projections.kept_last())

    def _evict(self, keys: Sequence[bytes]) -> None:
        record = self.turn.record
        for key in keys:
            evicted = e.ChunkEvicted(key, record.request_id, record.ordinal, self.generation, self.turn.cause)
            self.turn.decide(evicted)

    def _issue_kept(self, chunks: tuple[int, ...], kept: Mapping[int, None], reach: Reach | None) -> None:
        slots, block_ids = self._pairs(self.turn.projections.geometry.pages_of(chunks), kept)
        has_left = reach is not None and any(map(reach.has_left, kept))
        self._issue(chunks, slots, block_ids, self.before_forward or has_left)

    def _declined(self, first_chunk: int, num_chunks: int, reason: str = e.POOL_FULL) -> e.SaveDeclined:
        return e.SaveDeclined(
            request_id=self.turn.record.request_id,
            ordinal=self.turn.record.ordinal,
            generation=self.generation,
            first_chunk=first_chunk,
            num_chunks=num_chunks,
            reason=reason,
            cause=self.turn.cause,
        )
