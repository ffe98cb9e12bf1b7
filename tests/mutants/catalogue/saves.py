"""Mutants of saves: wrong tokens, wrong blocks, or blocks that change during the save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.edge import Edge
from kvledger.lifecycle import events as e
from kvledger.lifecycle import handlers
from kvledger.lifecycle.audit.rules.jobs import DeliveredOnce
from kvledger.lifecycle.decisions import saves
from kvledger.lifecycle.decisions.windows import SavablePages
from kvledger.lifecycle.projections import pool
from kvledger.lifecycle.projections.copies import CopyKind
from kvledger.lifecycle.projections.owed import Owed
from kvledger.lifecycle.projections.pool import HostSlots
from kvledger.lifecycle.projections.pool import num_intact_tokens as intact_tokens
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.states import RequestState
from mutants.catalogue.parts import SAVING, decided_otherwise, wrapped
from mutants.mutant import Patch, Touch, mutant
from mutants.scenes import HybridWorlds, Walks, Worlds

SMALL_POOL = Worlds(num_slots=12)
BESIDE = Worlds(connector=(("save_mode", "async"),))


def nothing_saved(owner: Any, name: str, touch: Touch) -> Patch:
    """Patch that drops all saves, and all declined saves, that a function decides."""

    def save(decision: e.Event, *_: Any) -> e.Event | None:
        if isinstance(decision, e.SaveIssued | e.SaveDeclined):
            touch()
            return None
        return decision

    return decided_otherwise(owner, name, save)


@mutant("CHUNK_COMPLETE", "vllm#54193", "vllm#49285", scene=Worlds())
def last_sampled_token_saved(touch: Touch) -> Sequence[Patch]:
    """The connector saves the last sampled token, though no step computed it."""

    def save_on_finish(turn: Any, event: e.RequestFinished) -> None:
        record, projections = turn.record, turn.projections
        size = projections.configuration.chunk_size
        blocks = record.lost_block_ids or ()
        has_place = event.num_tokens <= len(blocks) * projections.configuration.block_size
        if has_place and event.num_tokens % size == 0 and intact_tokens(event) == event.num_tokens - 1:
            touch()
            if not saves._is_doubtful(record, turn.before.current):
                savable = saves.savable_pages(record, projections.geometry, blocks, event.num_tokens, None)
                source = saves.Source(
                    blocks, savable, event.num_tokens, record.generation, is_async=False, is_lost=True
                )
                saves.save_from(turn, source, 0)
        else:
            original(turn, event)

    original = saves.save_on_finish
    return [(handlers, "save_on_finish", save_on_finish)]


@mutant("CHUNK_COMPLETE", "LMCache#653", scene=Worlds())
def saved_one_token_early(touch: Touch) -> Sequence[Patch]:
    """The connector saves a chunk though the last token of the chunk is not settled."""
    original = saves.save_settled

    def save_settled(turn: Any, first: int, num_settled: int) -> None:
        record, projections = turn.record, turn.projections
        blocks = record.block_ids or ()
        early = num_settled + 1
        is_whole = not early % projections.configuration.chunk_size
        num_keyed = len(record.keys) * projections.configuration.chunk_size
        if is_whole and early <= min(num_keyed, len(blocks) * projections.configuration.block_size):
            touch()
            num_settled = early
        original(turn, first, num_settled)

    return [(owner, "save_settled", save_settled) for owner in SAVING]


@mutant("SRC_BLOCK_OWNED", "vllm#52360", "vllm#46595", scene=Worlds())
def saved_from_old_blocks(touch: Touch) -> Sequence[Patch]:
    """The connector saves a resumed request from the blocks that it had before its preemption."""
    tables: dict[tuple[int, int], tuple[int, ...]] = {}

    def save(decision: e.Event, turn: Any, *_: Any) -> e.Event:
        if not isinstance(decision, e.SaveIssued):
            return decision
        record, projections = turn.record, turn.projections
        life = id(projections), record.ordinal
        table = tables.setdefault(life, tuple(record.block_ids or ()))
        pages = projections.geometry.pages_of(decision.chunks)
        block_ids = tuple(
            table[page] if record.generation and page < len(table) else block_id
            for page, block_id in zip(pages, decision.block_ids, strict=True)
        )
        if block_ids != decision.block_ids:
            touch()
        return msgspec.structs.replace(decision, block_ids=block_ids)

    return [decided_otherwise(owner, "save_settled", save) for owner in SAVING]


@mutant("STORE_CONTIGUOUS", "vllm#46972", scene=Worlds())
def trailing_chunk_left_out(touch: Touch) -> Sequence[Patch]:
    """In a chunked prefill, the connector never saves the last chunk that each step has settled."""
    original = saves.save_settled

    def save_settled(turn: Any, first: int, num_settled: int) -> None:
        if turn.record.state is RequestState.CHUNKED_PREFILL:
            touch()
            num_settled -= turn.projections.configuration.chunk_size
        original(turn, first, num_settled)

    return [(owner, "save_settled", save_settled) for owner in SAVING]


@mutant("SETTLED_SAVED", "vllm#53498", scene=Worlds())
def lost_unsaved(touch: Touch) -> Sequence[Patch]:
    """The connector saves nothing at a preemption, so settled tokens that were not saved before are lost."""
    return [nothing_saved(owner, "save_on_preemption", touch) for owner in SAVING]


@mutant("SETTLED_SAVED", "vllm#53498", scene=Worlds())
def end_unsaved(touch: Touch) -> Sequence[Patch]:
    """The connector saves nothing at the end of a request, so its last settled tokens are lost."""
    return [nothing_saved(handlers, "save_on_finish", touch)]


@mutant("SAVE_INTERVAL", "vllm#33881", scene=Worlds(connector=(("chunk_size", 8), ("save_interval_tokens", 16))))
def interval_counted_in_chunks(touch: Touch) -> Sequence[Patch]:
    """The connector takes the save interval for chunks instead of tokens, so it saves output tokens too late."""

    def threshold(original: Any, tracker: RequestTracker, record: Any, num_chunks: int) -> int:
        tokens: int = original(tracker, record, num_chunks)
        if tokens <= record.num_prompt_tokens:
            return tokens
        touch()
        return tokens + 15 * tracker._interval_chunks * tracker._chunk_size

    return [wrapped(RequestTracker, "save_threshold", threshold)]


@mutant("SAVE_INTERVAL", "vllm#53498", scene=Worlds(connector=(("chunk_size", 8), ("save_interval_tokens", 64))))
def prompt_waits_for_the_interval(touch: Touch) -> Sequence[Patch]:
    """The connector saves chunks of a prompt only at save intervals, though other requests could load them before."""

    def threshold(original: Any, tracker: RequestTracker, record: Any, num_chunks: int) -> int:
        tokens: int = original(tracker, record, num_chunks)
        later: int = (num_chunks // tracker._interval_chunks + 1) * tracker._interval_chunks * tracker._chunk_size
        if later > tokens:
            touch()
        return later

    return [wrapped(RequestTracker, "save_threshold", threshold)]


@mutant("SLOT_EXCLUSIVE", "vllm#46951", "pegaflow#418", scene=SMALL_POOL)
def slot_in_use_offered(touch: Touch) -> Sequence[Patch]:
    """The list of free slots contains a slot that holds a saved chunk, so a save overwrites this chunk."""

    def candidates(original: Any, slots: HostSlots, count: int) -> tuple[int, ...]:
        offered: tuple[int, ...] = original(slots, count)
        in_use = [slot for slot in range(slots.num_slots) if slots.num_references(slot) == 1 and slot not in offered]
        if len(in_use) < 4 or not offered:  # while the pool fills, all is well
            return offered
        touch()
        return (in_use[0], *offered[1:])

    return [wrapped(HostSlots, "candidates", candidates)]


@mutant("LOAD_XOR_STORES", "vllm#46014", scene=Walks())
def saved_while_loading(touch: Touch) -> Sequence[Patch]:
    """The connector saves blocks of a request while a load still fills them."""

    def save_settled(turn: Any, first: int, num_settled: int) -> None:
        record, projections = turn.record, turn.projections
        jobs = projections.jobs.of_life(record.ordinal)
        filled = {block for job in jobs if job.kind is CopyKind.LOAD for block in job.block_ids}

        def watch(decision: e.Event) -> e.Event:
            if isinstance(decision, e.SaveIssued) and not filled.isdisjoint(decision.block_ids):
                touch()
            return decision

        if saves._is_doubtful(record, record.current):
            return
        blocks, is_async = record.block_ids or (), projections.configuration.async_saves
        savable = saves.savable_pages(record, projections.geometry, blocks, num_settled, None)
        source = saves.Source(blocks, savable, num_settled, record.generation, is_async=is_async, is_lost=False)
        saves.save_from(turn.altered(watch), source, first)

    return [(owner, "save_settled", save_settled) for owner in SAVING]


@mutant("SRC_BLOCK_STABLE", "vllm#29870", "vllm#52360", scene=BESIDE)
def preemption_not_fenced(touch: Touch) -> Sequence[Patch]:
    """A step that may overwrite a block does not wait for the save that still reads the block."""

    def fence(decision: e.Event, *_: Any) -> None:
        if isinstance(decision, e.TransferAwaited):
            touch()

    return [decided_otherwise(owner, "fence_saves", fence) for owner in (saves, *SAVING)]


@mutant("BLOCK_REUSE_FENCED", "vllm#46951", "sglang#32564", scene=BESIDE)
def blocks_not_held(touch: Touch) -> Sequence[Patch]:
    """The connector does not make vLLM keep the blocks of an ended request that a copy still reads."""

    def hold(_original: Any, owed: Owed, ordinal: int, _request_id: str) -> None:
        if owed._saves_under_way(ordinal):
            touch()

    def answered(original: Any, edge: Edge, request_id: str, _keeps_blocks: bool) -> None:
        original(edge, request_id, bool(edge._held))

    # The edge, or whoever waits for the end of the copy, would notice first; what becomes of the blocks is another
    # question.
    return [
        wrapped(Owed, "_hold", hold),
        wrapped(Edge, "finished", answered),
        wrapped(DeliveredOnce, "_owe_held", lambda *_: None),
    ]


@mutant("GROUP_AGREEMENT", "vllm#47728", scene=HybridWorlds())
def saved_behind_the_window(touch: Touch) -> Sequence[Patch]:
    """The connector saves blocks before a sliding window, though the request no longer holds these blocks."""

    def is_seen(original: Any, savable: SavablePages, block: int, group: int) -> bool:
        if not original(savable, block, group):
            touch()
        return True

    return [wrapped(SavablePages, "_is_seen", is_seen)]


@mutant("CHUNK_COMPLETE", scene=Worlds(connector=(("save_mode", "sync"),)))
def saved_from_zeroed_blocks(touch: Touch) -> Sequence[Patch]:
    """When a request loses its blocks, the connector saves them, though vLLM may zero them before the copy."""

    def num_intact_tokens(event: e.RequestPreempted | e.RequestFinished) -> int:
        if event.blocks_zeroed and event.num_settled_tokens:
            touch()
        return event.num_settled_tokens

    return [
        (versions, "zeroes_new_blocks", lambda _kv_cache_config: True),
        *((module, "num_intact_tokens", num_intact_tokens) for module in (saves, pool)),
    ]
