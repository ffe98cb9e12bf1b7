"""Mutants of loads: wrong source, destination or length, and failures that are handled wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvledger.adapters.vllm import worker_side
from kvledger.adapters.vllm.prefix_cache import PrefixCache
from kvledger.adapters.vllm.unfilled_blocks import UnfilledBlocks
from kvledger.adapters.vllm.worker_side import WorkerSide
from kvledger.lifecycle import events as e
from kvledger.lifecycle import ledger
from kvledger.lifecycle.decisions import loads, lookups, reports
from kvledger.lifecycle.events import NO_SLOT, NULL_BLOCK
from kvledger.lifecycle.projections.copies import Copy
from kvledger.lifecycle.projections.pool import Pool
from mutants.catalogue.parts import LOADING, decided_otherwise, wrapped, written_as
from mutants.mutant import Patch, Touch, mutant
from mutants.scenes import FailedLoads, HybridWorlds, Walks, Worlds

FAILING = Worlds(
    faults=frozenset({"aborts", "storms", "failing copies"}),
    connector=(("load_mode", "sync"),),
    settings=(("num_steps", 120), ("enable_prefix_caching", False), ("async_scheduling", False)),
)

DIGESTED = Worlds(connector=(("digests", "all"), ("load_mode", "async")))


@mutant("ALLOC_MATCHES_LOOKUP", "vllm#34616", scene=Worlds())
def counted_from_blocks(touch: Touch) -> Sequence[Patch]:
    """The connector rounds the number of claimed tokens up to whole blocks."""

    def allocated(event: e.Event, journal: Any) -> e.Event:
        if not isinstance(event, e.BlocksAllocated) or not event.num_external_tokens:
            return event
        whole_blocks = -(-event.num_external_tokens // journal.configuration.block_size)
        counted = whole_blocks * journal.configuration.block_size
        if counted != event.num_external_tokens:
            touch()
        return msgspec.structs.replace(event, num_external_tokens=counted)

    return [written_as(allocated)]


@mutant("ALLOC_MATCHES_LOOKUP", scene=Walks())
def awaited_load_within_its_step(touch: Touch) -> Sequence[Patch]:
    """A load that the connector announced as asynchronous in its answer is issued as a synchronous load."""

    def load(decision: e.Event, *_: Any) -> e.Event:
        if not isinstance(decision, e.LoadIssued) or not decision.is_async:
            return decision
        touch()
        return msgspec.structs.replace(decision, is_async=False)

    return [decided_otherwise(owner, "load_what_was_answered", load) for owner in LOADING]


@mutant("EXTERNAL_ZERO_NO_LOAD", "LMCache#4355", "LMCache#4762", "vllm#55209", scene=Walks())
def loads_what_was_not_taken_up(touch: Touch) -> Sequence[Patch]:
    """The connector loads the tokens of its last answer, though vLLM claimed none of them."""
    original = loads.load_what_was_answered

    def load(turn: Any, event: e.BlocksAllocated) -> None:
        projections = turn.projections
        answer = turn.record.claimed
        if not event.num_external_tokens and answer is not None and answer.num_external_tokens:
            end_token = answer.num_computed_tokens + answer.num_external_tokens
            if end_token <= len(event.block_ids) * projections.configuration.block_size:
                touch()
                event = msgspec.structs.replace(event, num_external_tokens=answer.num_external_tokens)
        original(turn, event)

    return [(owner, "load_what_was_answered", load) for owner in LOADING]


def _of_pages(pages: range, end_token: int, slots: Sequence[Any], projections: Any) -> tuple[int, ...] | None:
    num_chunks = -(-end_token // projections.geometry.chunk_size)
    if len(slots) < num_chunks or None in slots:
        return None
    places = (projections.geometry.place_of(page, num_chunks) for page in pages)
    return tuple(slots[chunk][place] for chunk, place in places)


@mutant("LOADABLE_AFTER_COMMIT", "vllm#53498", scene=Walks())
def evicted_chunk_found(touch: Touch) -> Sequence[Patch]:
    """A lookup finds an evicted chunk, whose slots hold another chunk by now."""
    stale: dict[tuple[int, bytes], tuple[int, ...]] = {}

    def evicted(original: Any, pool: Pool, event: e.ChunksEvicted, sequence: int, subject: Any) -> None:
        stale.update(((id(pool), key), slots) for key in event.keys if (slots := pool.get(key)) is not None)
        original(pool, event, sequence, subject)

    def num_committed(_original: Any, pool: Pool, keys: Sequence[bytes], start: int = 0) -> int:
        count = start
        for key in keys[start:]:
            if pool.get(key) is None:
                if (id(pool), key) not in stale:
                    break
                touch()
            count += 1
        return count

    def slots_of_chunks(original: Any, pages: range, end_token: int, record: Any, projections: Any) -> Any:
        found = original(pages, end_token, record, projections)
        if found is not None:
            return found
        keys = record.keys[: -(-end_token // projections.geometry.chunk_size)]
        slots = [projections.pool.get(key) or stale.get((id(projections.pool), key)) for key in keys]
        return _of_pages(pages, end_token, slots, projections)

    def reset(original: Any, pool: Pool, event: e.CacheReset, sequence: int, subject: Any) -> None:
        original(pool, event, sequence, subject)
        stale.clear()

    return [
        wrapped(Pool, "_reset", reset),
        wrapped(Pool, "_evicted", evicted),
        wrapped(Pool, "num_committed", num_committed),
        wrapped(loads, "_slots_of_chunks", slots_of_chunks),
    ]


@mutant("LOADABLE_AFTER_COMMIT", "LMCache#2243", "LMCache#2336", scene=Walks())
def loaded_in_another_order(touch: Touch) -> Sequence[Patch]:
    """A load reads the right slots in reverse order, so its blocks get one another's KV."""

    def load(decision: e.Event, *_: Any) -> e.Event:
        if not isinstance(decision, e.LoadIssued) or len(decision.slots) < 2:
            return decision
        touch()
        return msgspec.structs.replace(decision, slots=decision.slots[::-1])

    return [decided_otherwise(owner, "load_what_was_answered", load) for owner in LOADING]


@mutant("LOAD_DST_EXCLUSIVE", "vllm#45357", "vllm#49250", scene=Walks())
def loads_into_shared_blocks(touch: Touch) -> Sequence[Patch]:
    """A load starts at the first block of the block table, though other requests share that block."""

    def load(decision: e.Event, _turn: Any, event: Any) -> e.Event:
        if not isinstance(decision, e.LoadIssued) or decision.block_ids == event.block_ids[: len(decision.block_ids)]:
            return decision
        touch()
        return msgspec.structs.replace(decision, block_ids=event.block_ids[: len(decision.block_ids)])

    return [decided_otherwise(owner, "load_what_was_answered", load) for owner in LOADING]


@mutant("FAILED_LOAD_TAINT", "vllm#55297", scene=Walks())
def failed_load_offered_again(touch: Touch) -> Sequence[Patch]:
    """The connector offers a chunk again, though a load of the chunk failed."""

    def failed(decision: e.Event, *_: Any) -> e.Event | None:
        if not isinstance(decision, e.ChunksTainted):
            return decision
        touch()
        return None

    return [decided_otherwise(reports, "_fail", failed)]


@mutant("FAILED_LOAD_TAINT", "vllm#49250", scene=FailedLoads())
def unfilled_blocks_stay_hashed(touch: Touch) -> Sequence[Patch]:
    """Blocks that a failed load did not fill stay in vLLM's prefix cache."""

    def evict(_original: Any, cache: PrefixCache, block_ids: Any) -> None:
        assert cache._manager is not None
        blocks = cache._manager.block_pool.blocks
        if any(blocks[block_id].block_hash is not None for block_id in block_ids):
            touch()

    return [wrapped(PrefixCache, "evict", evict)]


@mutant("FAILED_LOAD_TAINT", "vllm#49250", scene=FailedLoads(ends=("owner", "sharer")))
def saved_on_top_of_a_failed_load(touch: Touch) -> Sequence[Patch]:
    """A save of chunks that were computed from a failed load's KV counts as completed, so lookups find the chunks."""

    def settled(decision: e.Event, _turn: Any, job: Copy) -> e.Event:
        if not isinstance(decision, e.SaveFailed) or job.ranks_failed or not job.is_doubtful:
            return decision
        touch()
        life = decision.request_id, decision.ordinal, decision.generation
        return e.SaveCompleted(*life, job_id=decision.job_id, cause=decision.cause)

    return [decided_otherwise(ledger, "settle", settled)]


@mutant("ROLLBACK_OBSERVED", "LMCache#3388", "vllm-ascend#13099", scene=FAILING)
def failed_blocks_not_told(touch: Touch) -> Sequence[Patch]:
    """The worker does not report the blocks that a failed load left unfilled, so the request is not rolled back."""

    def take_failed_block_ids(original: Any, side: WorkerSide) -> set[int]:
        if original(side):
            touch()
        return set()

    # The edge would notice first; whether the request is rolled back is another question.
    return [
        wrapped(WorkerSide, "take_failed_block_ids", take_failed_block_ids),
        wrapped(UnfilledBlocks, "compare", lambda *_: None),
    ]


@mutant("GROUP_AGREEMENT", "vllm#52735", "vllm#45268", scene=HybridWorlds())
def one_group_answers_for_all(touch: Touch) -> Sequence[Patch]:
    """A hit in the full-attention group counts as a hit in all groups."""

    def last_boundary(original: Any, num_tokens: int, record: Any, projections: Any) -> int:
        if original(num_tokens, record, projections) != num_tokens:
            touch()
        return num_tokens

    def slots_with_windows(
        _original: Any, pages: range, block_ids: Any, end_token: int, record: Any, projections: Any
    ) -> Any:
        return tuple(
            NO_SLOT if block_id == NULL_BLOCK else loads.slot_of_page(page, end_token, record, projections)
            for page, block_id in zip(pages, block_ids, strict=True)
        )

    return [wrapped(lookups, "last_boundary", last_boundary), wrapped(loads, "_slots_with_windows", slots_with_windows)]


@mutant("BYTES_UNCHANGED", "Mooncake#3140", "vllm#54363", scene=DIGESTED)
def a_bit_falls_over_in_the_host_pool(touch: Touch) -> Sequence[Patch]:
    """One bit of a slot flips in host memory between the save into the slot and a load from the slot."""

    def begin_load(original: Any, side: WorkerSide, jobs: Any, engine: Any) -> Any:
        (job,) = jobs
        slots = [slot for slot, page in zip(job.slots, job.pages, strict=False) if page >= 0]
        if slots:
            touch()
            side._pool.buffer[slots[0], 0] ^= 1  # type: ignore[union-attr]
        return original(side, jobs, engine)

    return [wrapped(WorkerSide, "_begin_load", begin_load)]


@mutant("BYTES_UNCHANGED", "vllm#57912", "LMCache#4558", scene=DIGESTED)
def two_blocks_of_a_load_change_places(touch: Touch) -> Sequence[Patch]:
    """A load copies its first slot into its second block, and its second slot into its first block."""

    def begin_load(original: Any, side: WorkerSide, jobs: Any, engine: Any) -> Any:
        (job,) = jobs
        if len(job.slots) < 2 or len(job.pages) < 2 or min(job.pages[:2]) < 0:
            return original(side, jobs, engine)
        touch()
        first, second, *others = job.slots
        side._digests.before_load(job)  # type: ignore[union-attr]
        return engine.start_load((second, first, *others), job.block_ids)

    return [wrapped(WorkerSide, "_begin_load", begin_load)]


@mutant("BYTES_UNCHANGED", scene=DIGESTED)
def joined_saves_mix_their_slots(touch: Touch) -> Sequence[Patch]:
    """A worker that makes several saves in one copy gives their slots in another order than their blocks."""

    def pairs(original: Any, jobs: Any) -> Any:
        block_ids, slots = original(jobs)
        if len(jobs) == 1:
            return block_ids, slots
        touch()
        return block_ids, (*slots[len(jobs[0].slots) :], *jobs[0].slots)

    return [wrapped(worker_side, "_pairs", pairs)]
