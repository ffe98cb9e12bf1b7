"""Mistakes about lookups: what is answered, what it is answered for, and what an answer keeps from being evicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.decisions import lookups
from kvledger.lifecycle.handlers import new
from kvledger.lifecycle.projections.chunk_index import ChunkIndex
from kvledger.lifecycle.projections.lookup_cache import LookupCache
from kvledger.lifecycle.projections.save_cursor import SaveCursor
from kvledger.lifecycle.projections.transfers import Transfers
from mutants.catalogue.parts import decided_otherwise, wrapped, written_as
from mutants.mutant import Patch, Touch, mutant
from mutants.scenes import Walks, Worlds

SMALL_POOL = (("host_bytes", 2 * 8 * 16 * 2 * 20),)
CACHED = Worlds(settings=(("num_steps", 120), ("enable_prefix_caching", True)))
RESETTING = Worlds(faults=frozenset({"aborts", "storms", "resets"}))
SLOW = Worlds(
    faults=frozenset({"aborts", "storms", "delayed reports"}),
    connector=(("save_mode", "async"), ("max_deferred_lookups", 8), ("max_silent_steps", 64)),
)


@mutant("LOOKUP_PURE", "a repeated lookup answers the cached hit as it is, not what lies behind the local one",
        "LMCache#2158", scene=CACHED)  # fmt: skip
def raw_cached_hit(touch: Touch) -> Sequence[Patch]:
    def answered(decision: e.Event, event: Any, record: Any, projections: Any, _cause: int) -> e.Event:
        cached = projections.lookups.pending(event.request_id)
        if cached is None or not isinstance(decision, e.LookupAnswered) or not decision.num_external_tokens:
            return decision
        if decision.num_external_tokens != decision.num_hit_tokens:
            touch()
        return attrs.evolve(decision, num_external_tokens=decision.num_hit_tokens)

    return [decided_otherwise(new, "answer_lookup", answered)]


@mutant("LAST_TOKEN", "a hit of the whole prompt is answered whole, and nothing is left to compute",
        "LMCache#3322", "vllm#50864", "vllm#55113", scene=Walks())  # fmt: skip
def whole_prompt_loaded(touch: Touch) -> Sequence[Patch]:
    def answered(decision: e.Event, event: Any, _record: Any, projections: Any, _cause: int) -> e.Event:
        if not isinstance(decision, e.LookupAnswered) or decision.miss_reason in {"load_failed", "quarantined"}:
            return decision
        whole = decision.num_tokens - decision.num_computed_tokens
        if decision.num_hit_tokens < decision.num_tokens or whole == decision.num_external_tokens:
            return decision
        touch()
        return attrs.evolve(decision, num_external_tokens=whole)

    return [decided_otherwise(new, "answer_lookup", answered)]


@mutant("RESUME_COVERS_OUTPUT", "a preempted request is looked up by its prompt alone",
        "LMCache#1969", "LMCache#1361", scene=Worlds())  # fmt: skip
def prompt_only(touch: Touch) -> Sequence[Patch]:
    def asked(event: e.Event, journal: Any) -> e.Event:
        if not isinstance(event, e.LookupRequested):
            return event
        record = journal.tracker.get(event.request_id)
        if record is None or event.num_tokens == record.num_prompt_tokens:
            return event
        touch()
        return attrs.evolve(event, num_tokens=record.num_prompt_tokens)

    return [written_as(asked)]


@mutant("CURSOR_LE_FRONTIER", "every lookup moves the save cursor behind its hit", "LMCache#4508", scene=Worlds())
def cursor_moved_by_lookups(touch: Touch) -> Sequence[Patch]:
    def folds(original: Any, cursor: SaveCursor) -> Mapping[Any, Any]:
        def answered(event: e.LookupAnswered, _sequence: int) -> None:
            num_chunks = event.num_hit_tokens // cursor._chunk_size
            if num_chunks:
                touch()
                cursor._num_chunks[event.request_id] = cursor.num_chunks(event.request_id) + num_chunks

        return {**original(cursor), e.LookupAnswered: answered}

    return [wrapped(SaveCursor, "folds", folds)]


@mutant("DEFER_BOUNDED", "nobody counts how often a lookup is put off", "vllm#49829", "LMCache#5047", scene=SLOW)
def deferred_for_ever(touch: Touch) -> Sequence[Patch]:
    def num_deferred(original: Any, cache: LookupCache, request_id: str) -> int:
        if original(cache, request_id):
            touch()
        return 0

    return [wrapped(LookupCache, "num_deferred", num_deferred)]


@mutant("HIT_PINNED", "what was promised may be evicted until it is taken up", "vllm#39702", scene=Walks())
def promise_not_pinned(touch: Touch) -> Sequence[Patch]:
    def answered(_original: Any, _index: ChunkIndex, event: e.LookupAnswered, _sequence: int) -> None:
        if event.num_external_tokens:
            touch()

    return [wrapped(ChunkIndex, "_answered", answered)]


@mutant("PIN_BALANCE", "a request that ends between lookup and allocation leaves its chunks pinned for ever",
        "vllm#44100", "LMCache#4512", "LMCache#1034", scene=Walks(num_steps=200))  # fmt: skip
def pin_never_released(touch: Touch) -> Sequence[Patch]:
    def finished(_original: Any, index: ChunkIndex, event: e.RequestFinished, _sequence: int) -> None:
        if event.request_id in index._pinned_by:
            touch()
            del index._pinned_by[event.request_id]  # forgotten, but not counted down
        index._no_longer_want(event.request_id)
        index._renew(index._chunk_keys.of(event.request_id))

    return [wrapped(ChunkIndex, "_finished", finished)]


@mutant("EVICT_IDLE_ONLY", "a chunk is evicted while a load reads it", "sglang#28468", "Mooncake#3253", scene=Walks())
def evicted_while_read(touch: Touch) -> Sequence[Patch]:
    def is_read(original: Any, transfers: Transfers, slot: int) -> bool:
        if original(transfers, slot):
            touch()
        return False

    return [wrapped(Transfers, "is_read", is_read)]


@mutant("RESET_EPOCH", "a reset leaves the saved chunks where they are", "vllm#57727", "vllm#48090", scene=RESETTING)
def chunks_survive_a_reset(touch: Touch) -> Sequence[Patch]:
    def reset(_original: Any, index: ChunkIndex, _event: e.CacheReset, _sequence: int) -> None:
        if len(index):
            touch()

    return [wrapped(ChunkIndex, "_reset", reset)]


_ = lookups  # the room whose answers are changed here
