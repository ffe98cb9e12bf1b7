"""Mutants of lookups: wrong answers, and answers that do not protect their chunks from eviction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.decisions import lookups
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.base import Subject
from kvledger.lifecycle.projections.copies import Copy, CopyKind
from kvledger.lifecycle.projections.costs import TokenCosts
from kvledger.lifecycle.projections.lookup_cache import LookupCache
from kvledger.lifecycle.projections.pool import Pool, num_intact_tokens
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.states import CurrentRegion
from mutants.catalogue.parts import LOOKING_UP, decided_otherwise, wrapped, written_as
from mutants.mutant import Patch, Touch, mutant
from mutants.scenes import HybridWorlds, Walks, Worlds

SMALL_POOL = Worlds(num_slots=8)
TINY_POOL = Worlds(num_slots=5)
"""So small that a chunk held too long leaves no room for saves, before other chunks are evicted instead of it."""
CROWDED = Worlds(num_slots=16, connector=(("keep_for_preempted", True), ("chunk_size", 16)))
CACHED = Worlds(settings=(("num_steps", 120), ("enable_prefix_caching", True)))
ROOMY = Worlds(
    settings=(("num_steps", 120), ("num_blocks", 200)), connector=(("chunk_size", 8), ("save_interval_tokens", 0))
)
"""Enough blocks to admit each request after one lookup. Repeated lookups would move a request's cursor past all tokens
that it ever computes. No step can name such a cursor, and SAVE_INTERVAL correctly reports the missing saves."""
RESETTING_BESIDE = Worlds(
    faults=frozenset({"resets", "delayed reports"}), connector=(("save_mode", "async"), ("max_silent_steps", 64))
)
SLOW_COPIES = Worlds(
    settings=(("num_steps", 200), ("num_blocks", 14), ("ns_per_page", 10**9), ("enable_prefix_caching", False)),
    connector=(("offer", "auto"),),
)
WHOLE_BLOCKS = ((16, 16), (32, 16))
"""No chunks below the block size: their images share slots, and leave them without an eviction."""
RESETTING = Worlds(faults=frozenset({"aborts", "storms", "resets"}))
SLOW = Worlds(
    faults=frozenset({"aborts", "storms", "delayed reports"}),
    connector=(("save_mode", "async"), ("max_deferred_lookups", 8), ("max_silent_steps", 64)),
)
SHARING = Worlds(
    settings=(("num_steps", 120), ("enable_prefix_caching", True)),
    faults=frozenset({"aborts", "storms", "delayed reports"}),
    connector=(("load_mode", "async"), ("max_deferred_lookups", 8), ("max_silent_steps", 64), ("offer", "always")),
)


@mutant("LOOKUP_PURE", "LMCache#2158", scene=CACHED)
def raw_cached_hit(touch: Touch) -> Sequence[Patch]:
    """The answer to a repeated lookup is the whole hit. vLLM's computed tokens are not subtracted from the hit."""

    def answered(decision: e.Event, turn: Any, _event: Any) -> e.Event:
        if turn.record.answer is None or not isinstance(decision, e.LookupAnswered) or not decision.num_external_tokens:
            return decision
        if decision.num_external_tokens != decision.num_hit_tokens:
            touch()
        return msgspec.structs.replace(decision, num_external_tokens=decision.num_hit_tokens)

    return [decided_otherwise(owner, "answer_lookup", answered) for owner in LOOKING_UP]


@mutant("LOOKUP_PURE", "LMCache#2158", scene=CACHED)
def local_hit_frozen(touch: Touch) -> Sequence[Patch]:
    """From the hit of a repeated lookup, the connector subtracts the number of computed tokens at the first lookup."""
    first: dict[tuple[int, str, int], int] = {}

    def answered(decision: e.Event, turn: Any, event: Any) -> e.Event:
        if not isinstance(decision, e.LookupAnswered):
            return decision
        life = id(turn.projections), event.request_id, turn.record.generation
        num_local = first.setdefault(life, event.num_computed_tokens)
        answer = max(0, decision.num_external_tokens + event.num_computed_tokens - num_local)
        if decision.num_external_tokens and answer != decision.num_external_tokens:
            touch()
            return msgspec.structs.replace(decision, num_external_tokens=answer)
        return decision

    return [decided_otherwise(owner, "answer_lookup", answered) for owner in LOOKING_UP]


@mutant("LONGEST_HIT", "LMCache#4612", "LMCache#5248", scene=Worlds())
def preempted_finds_nothing(touch: Touch) -> Sequence[Patch]:
    """The connector answers a preempted request's lookup with 0 tokens, though its chunks are stored."""

    def num_hit_chunks(original: Any, cache: LookupCache, request: RequestRecord) -> int:
        found: int = original(cache, request)
        if request.generation and found:
            touch()
            return 0
        return found

    return [wrapped(LookupCache, "num_hit_chunks", num_hit_chunks)]


@mutant("LONGEST_HIT", scene=SLOW_COPIES)
def slower_without_proof(touch: Touch) -> Sequence[Patch]:
    """After a few loads, the connector stops offering tokens, even if loading them is faster than computing them."""

    def costs_more(original: Any, costs: TokenCosts) -> bool:
        if not original(costs):
            touch()
        return True

    return [wrapped(TokenCosts, "_costs_more", costs_more)]


@mutant("LONGEST_HIT", scene=SLOW_COPIES)
def never_tried_again(touch: Touch) -> Sequence[Patch]:
    """After loads were measured to be slower than computing the tokens, the connector never offers tokens again."""

    def is_slower(original: Any, costs: TokenCosts, time_ns: int) -> bool:
        if costs.state.declined_until_ns is None:
            return False
        if not original(costs, time_ns):
            touch()
        return True

    return [wrapped(TokenCosts, "is_slower", is_slower)]


@mutant("LAST_TOKEN", "LMCache#3322", "vllm#50864", "vllm#55113", scene=Worlds())
def whole_prompt_loaded(touch: Touch) -> Sequence[Patch]:
    """If all tokens of a lookup are stored, the connector offers all of them, so vLLM has no token to compute."""

    def answered(decision: e.Event, *_: Any) -> e.Event:
        if not isinstance(decision, e.LookupAnswered) or decision.miss_reason in {"load_failed", "quarantined"}:
            return decision
        whole = decision.num_tokens - decision.num_computed_tokens
        if decision.num_hit_tokens < decision.num_tokens or whole == decision.num_external_tokens:
            return decision
        touch()
        return msgspec.structs.replace(decision, num_external_tokens=whole)

    def prompt(original: Any, world: Any, rng: Any, num_tokens: int) -> list[int]:
        """Give many clients the same prompt of whole chunks."""
        drawn: list[int] = original(world, rng, num_tokens)
        return world._shared_prefix[:64] if num_tokens % 2 else drawn

    from sim.world import World

    lookups = [decided_otherwise(owner, "answer_lookup", answered) for owner in LOOKING_UP]
    return [*lookups, wrapped(World, "prompt", prompt)]


@mutant("RESUME_COVERS_OUTPUT", "LMCache#1969", "LMCache#1361", scene=Worlds())
def prompt_only(touch: Touch) -> Sequence[Patch]:
    """The lookup of a preempted request covers only its prompt."""

    def asked(event: e.Event, journal: Any) -> e.Event:
        if not isinstance(event, e.LookupRequested):
            return event
        record = journal.tracker.get(event.request_id)
        if record is None or event.num_tokens == record.num_prompt_tokens:
            return event
        touch()
        return msgspec.structs.replace(event, num_tokens=record.num_prompt_tokens)

    return [written_as(asked)]


@mutant("CURSOR_LE_FRONTIER", "LMCache#4508", scene=ROOMY)
def cursor_moved_by_lookups(touch: Touch) -> Sequence[Patch]:
    """Every lookup moves the save cursor (the next chunk to save) forward by the number of chunks in the hit."""

    def folded(original: Any, tracker: RequestTracker) -> dict[Any, Any]:
        def answered(event: e.LookupAnswered, sequence: int, subject: Subject) -> None:
            folds[e.LookupAnswered](event, sequence, subject)
            num_chunks = event.num_hit_tokens // tracker._chunk_size
            if num_chunks and subject.request is not None:
                touch()
                subject.request.num_chunks_handled += num_chunks

        folds: dict[Any, Any] = original(tracker)
        return {**folds, e.LookupAnswered: answered}

    return [wrapped(RequestTracker, "folds", folded)]


@mutant("DEFER_BOUNDED", "vllm#49829", "LMCache#5047", scene=SLOW)
def deferred_for_ever(touch: Touch) -> Sequence[Patch]:
    """The connector does not count how often it defers a lookup."""

    def next_deferral(original: Any, record: RequestRecord, job_id: int, *, is_shared: bool) -> int:
        if original(record, job_id, is_shared=is_shared) > 1:
            touch()
        return 1

    return [wrapped(RequestRecord, "next_deferral", next_deferral)]


@mutant("DEFER_BOUNDED", "vllm#44294", scene=SHARING)
def deferred_for_any_load(touch: Touch) -> Sequence[Patch]:
    """The connector defers a lookup until the load of another request ends, even if the requests share no chunk."""

    def shared_load(
        original: Any, end_token: int, num_computed_tokens: int, record: RequestRecord, projections: Projections
    ) -> Copy | None:
        found: Copy | None = original(end_token, num_computed_tokens, record, projections)
        keys = set(record.keys)
        others = (job for job in projections.jobs.async_loads.values() if keys.isdisjoint(job.keys))
        if found is None and end_token > num_computed_tokens and (found := next(others, None)) is not None:
            touch()
        return found

    return [wrapped(lookups, "shared_load", shared_load)]


@mutant("HIT_PINNED", "vllm#39702", scene=SMALL_POOL)
def promise_not_pinned(touch: Touch) -> Sequence[Patch]:
    """Chunks that an answer offers can be evicted before vLLM claims them."""

    def answered(_original: Any, _pool: Pool, event: e.LookupAnswered, _sequence: int, _subject: Any) -> None:
        if event.num_external_tokens:
            touch()

    return [wrapped(Pool, "_answered", answered)]


@mutant("WAITING_KEPT", "vllm#47234", scene=CROWDED)
def evicted_while_waited_for(touch: Touch) -> Sequence[Patch]:
    """Chunks that a preempted request will need again are evicted like any others."""

    def preempted(original: Any, pool: Pool, event: e.RequestPreempted, sequence: int, subject: Any) -> None:
        pool._keep_for_preempted = False
        if (
            subject.request is not None
            and subject.request.keys[: pool._geometry.num_chunks_in(num_intact_tokens(event))]
        ):
            touch()
            pool.__dict__.setdefault("waiting", {})[subject.request.ordinal] = list(subject.request.keys)
        original(pool, event, sequence, subject)

    def allocated(original: Any, pool: Pool, event: e.BlocksAllocated, sequence: int, subject: Any) -> None:
        original(pool, event, sequence, subject)
        if subject.request is not None:  # what nobody held is used, at least
            pool.forest.use(pool.__dict__.get("waiting", {}).pop(subject.request.ordinal, ()))

    return [wrapped(Pool, "_preempted", preempted), wrapped(Pool, "_allocated", allocated)]


@mutant("PIN_BALANCE", "LMCache#1254", "LMCache#3381", "vllm#44100", scene=TINY_POOL)
def pinned_by_every_poll(touch: Touch) -> Sequence[Patch]:
    """Every repeated lookup pins the hit's chunks again against eviction, but only one of these pins is removed."""

    def answered(original: Any, pool: Pool, event: e.LookupAnswered, sequence: int, subject: Any) -> None:
        ordinal, promised = event.ordinal, pool.state.promised
        before = promised.get(ordinal)
        original(pool, event, sequence, subject)
        if before is not None and before == promised.get(ordinal):
            touch()
            pool.forest.count_holder(before)

    return [wrapped(Pool, "_answered", answered)]


@mutant("EVICT_IDLE_ONLY", "sglang#28468", "Mooncake#3253", scene=Walks(chunks_in_blocks=WHOLE_BLOCKS))
def evicted_while_read(touch: Touch) -> Sequence[Patch]:
    """A chunk is evicted while a load reads it."""

    def keys_before(pool: Any, event: e.LoadIssued, subject: Any) -> tuple[Any, int]:
        keys = () if subject.request is None else subject.request.keys
        return keys, event.first_token // pool._geometry.chunk_size

    def load_issued(original: Any, pool: Any, event: e.LoadIssued, sequence: int, subject: Any) -> None:
        original(pool, event, sequence, subject)
        pool._hold(pool.state.copying, event.job_id, *keys_before(pool, event, subject))

    def load_settled(original: Any, pool: Any, event: Any, sequence: int, subject: Any) -> None:
        job = subject.copy
        if job is not None:
            pool.slots.acquire(tuple(pool.__dict__.get("lost", {}).pop(event.job_id, ())))
        original(pool, event, sequence, subject)
        if job is not None:
            pool.forest.use(job.keys)

    def evicted(original: Any, pool: Any, event: e.ChunksEvicted, sequence: int, subject: Any) -> None:
        slots = {slot for key in event.keys for slot in pool.get(key) or ()}
        original(pool, event, sequence, subject)
        for job in pool._jobs:
            lost = slots.intersection(job.slots) if job.kind is CopyKind.LOAD else ()
            if lost:
                touch()
                pool.slots.release(lost)
                pool.__dict__.setdefault("lost", {}).setdefault(job.job_id, []).extend(lost)

    return [
        wrapped(Pool, "_evicted", evicted),
        wrapped(Pool, "_load_issued", load_issued),
        wrapped(Pool, "_load_settled", load_settled),
    ]


@mutant("RESET_EPOCH", "vllm#57727", "vllm#48090", scene=RESETTING)
def chunks_survive_a_reset(touch: Touch) -> Sequence[Patch]:
    """A cache reset does not remove the saved chunks."""

    def reset(_original: Any, pool: Pool, _event: e.CacheReset, _sequence: int, _subject: Any) -> None:
        if len(pool):
            touch()

    return [wrapped(Pool, "_reset", reset)]


@mutant("RESET_EPOCH", "vllm#48090", scene=RESETTING_BESIDE)
def late_save_committed(touch: Touch) -> Sequence[Patch]:
    """A save in flight during a cache reset is committed after the reset."""

    def save_completed(original: Any, pool: Pool, event: e.SaveCompleted, sequence: int, subject: Any) -> None:
        job = subject.copy
        if job is not None and job.epoch != pool._jobs.epoch:
            touch()
            job.epoch = pool._jobs.epoch
            keys = job.keys if subject.request is None else subject.request.keys
            pool._hold(pool.state.copying, job.job_id, keys, len(keys))
        original(pool, event, sequence, subject)

    return [wrapped(Pool, "_save_completed", save_completed)]


@mutant("RESET_EPOCH", "kvledger 0.1.0", scene=Walks())
def stale_session_saved(touch: Touch) -> Sequence[Patch]:
    """In a session's next turn, blocks from before a cache reset count as filled after the reset."""

    def continued(
        original: Any, tracker: RequestTracker, event: e.SessionContinued, sequence: int, subject: Any
    ) -> None:
        record = tracker.get(event.request_id)
        if record is not None and record.current is CurrentRegion.STALE:
            touch()
            record.current = CurrentRegion.CURRENT
        original(tracker, event, sequence, subject)

    return [wrapped(RequestTracker, "_session_continued", continued)]


def answered_as(is_async: bool, touch: Touch) -> Sequence[Patch]:
    """Patch that answers every load as asynchronous, or every load as synchronous."""

    def answered(decision: e.Event, *_: Any) -> e.Event:
        if not isinstance(decision, e.LookupAnswered) or not decision.num_external_tokens:
            return decision
        if decision.is_async is not is_async:
            touch()
        return msgspec.structs.replace(decision, is_async=is_async)

    return [decided_otherwise(owner, "answer_lookup", answered) for owner in LOOKING_UP]


@mutant("LOOKUP_PURE", scene=HybridWorlds())
def loaded_within_the_step_into_several_groups(touch: Touch) -> Sequence[Patch]:
    """If the model has several groups, the connector offers a synchronous load, whose failure would end the engine."""
    return answered_as(False, touch)


@mutant("LOOKUP_PURE", scene=Walks())
def loaded_asynchronously_against_the_settings(touch: Touch) -> Sequence[Patch]:
    """The connector offers tokens with an asynchronous load, though the settings allow only synchronous loads."""
    return answered_as(True, touch)
