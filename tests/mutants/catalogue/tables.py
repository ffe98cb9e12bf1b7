"""Mutants of block tables, token counts and chunk keys."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from kvledger.adapters.vllm.observe import RequestReader, StepReader
from kvledger.lifecycle import events as e
from kvledger.lifecycle.ledger import Ledger
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.states import FirstRegion, RequestState
from kvledger.lifecycle.steps import StepEncoder
from mutants.catalogue.parts import wrapped
from mutants.mutant import Patch, Touch, mutant
from mutants.scenes import Worlds

WITHIN_STEPS = Worlds(connector=(("save_mode", "sync"), ("load_mode", "sync")))
RUNNER_V1 = Worlds(settings=(("num_steps", 120), ("model_runner_v2", False)))


@mutant("TABLE_EQ", "vllm#46595", "vllm#57816", "LMCache#2336", scene=RUNNER_V1)
def table_appended(touch: Touch) -> Sequence[Patch]:
    """The block table of a resumed request is appended to the request's old table instead of replacing that table."""

    def extended(original: Any, reader: StepReader, cached: Any) -> Any:
        if cached.resumed_req_ids:
            touch()
            cached = replace(cached, resumed_req_ids=set())
        return original(reader, cached)

    return [wrapped(StepReader, "_extended", extended)]


@mutant("TABLE_EQ", "LMCache#3640", "vllm#54853", scene=Worlds())
def later_blocks_skipped(touch: Touch) -> Sequence[Patch]:
    """The connector does not record the blocks that a resumed request gets in later steps."""

    def extended(original: Any, reader: StepReader, cached: Any) -> Any:
        kept = []
        for ordinal, block_ids in original(reader, cached):
            record = reader._tracker.of(ordinal)
            if record is not None and record.num_preemptions:
                touch()
            else:
                kept.append((ordinal, block_ids))
        return kept

    return [wrapped(StepReader, "_extended", extended)]


@mutant("STEP_SUM", "LMCache#2912", scene=Worlds())
def paused_not_told(touch: Touch) -> Sequence[Patch]:
    """A decoding request that vLLM does not schedule in a step counts as scheduled in that step."""

    def paused(original: Any, encoder: StepEncoder, scheduled: Any) -> Any:
        if original(encoder, scheduled):
            touch()
        return ()

    return [wrapped(StepEncoder, "paused", paused)]


@mutant("CURSOR_LE_FRONTIER", "LMCache#3145", scene=Worlds())
def cursor_regresses(touch: Touch) -> Sequence[Patch]:
    """A step records a save cursor (the next chunk to save) that is one chunk too low."""

    def settled(original: Any, encoder: StepEncoder, *arguments: Any) -> e.SettledTokens | None:
        entry: e.SettledTokens | None = original(encoder, *arguments)
        if entry is None or entry.first_chunk <= 1:
            return entry
        touch()
        return entry._replace(first_chunk=entry.first_chunk - 1)

    return [wrapped(StepEncoder, "settled", settled)]


@mutant("TOKEN_CONSERVATION", "LMCache#2912", "vllm#36812", scene=Worlds())
def counted_from_first_admission(touch: Touch) -> Sequence[Patch]:
    """When a request resumes with loaded tokens, its number of computed tokens is taken from its first admission."""
    began: dict[tuple[int, str], int] = {}

    def advanced(original: Any, reader: StepReader, counts: Any, num_scheduled: Any) -> Any:
        return original(
            reader, [(request_id, count(reader, request_id, num)) for request_id, num in counts], num_scheduled
        )

    def count(reader: StepReader, request_id: str, num_computed: int) -> int:
        record = reader._tracker.get(request_id)
        if record is not None and not reader._tracker.num_computed_tokens(record):
            first = began.setdefault((id(reader), request_id), num_computed)
            answer = reader._tracker.get(request_id).claimed
            if first != num_computed and answer is not None and answer.num_external_tokens:
                touch()
                return first
        return num_computed

    return [wrapped(StepReader, "_advanced", advanced)]


@mutant("KEY_IDENTITY", "vllm#42119", "LMCache#1380", scene=Worlds(connector=(("chunk_size", 16),)))
def key_of_own_tokens(touch: Touch) -> Sequence[Patch]:
    """A chunk's key depends only on its own tokens, not on the tokens before it."""
    from sim.world import World

    from kvledger.adapters.vllm.chunk_keys import ChunkKeySource

    def keys(original: Any, source: ChunkKeySource, request: Any, first_chunk: int, parent: Any) -> Any:
        made = original(source, request, first_chunk, parent)
        touch()
        size = source._chunk_size
        tokens = list(request.all_token_ids)
        return tuple(
            hashlib.blake2b(repr(tokens[chunk * size : (chunk + 1) * size]).encode(), digest_size=16).digest()
            for chunk in range(first_chunk, first_chunk + len(made))
        )

    def prompt(original: Any, world: Any, rng: Any, num_tokens: int) -> list[int]:
        """Put a different document before the shared prefix in some prompts."""
        drawn: list[int] = original(world, rng, num_tokens)
        return [*world.tokens(rng, 16), *world._shared_prefix[:48]] if num_tokens % 2 else drawn

    return [wrapped(ChunkKeySource, "keys", keys), wrapped(World, "prompt", prompt)]


WHOLE_BLOCKS = Worlds(connector=(("chunk_size", 32),))


def _keys_moved(touch: Touch, by: int) -> Patch:
    """Patch that makes the keys of whole blocks from the hashes `by` blocks further on."""
    from kvledger.adapters.vllm.chunk_keys import ChunkKeySource

    def keys_of_blocks(original: Any, source: ChunkKeySource, request: Any, first_chunk: int, parent: Any) -> Any:
        made = list(original(source, request, first_chunk, parent))
        hashes, step = request.block_hashes, source._hashes_per_chunk
        for number in range(len(made)):
            block = (first_chunk + number + 1) * step - 1 + by
            if 0 <= block < len(hashes):
                touch()
                made[number] = bytes(hashes[block])[:16]
        return tuple(made)

    return wrapped(ChunkKeySource, "_keys_of_blocks", keys_of_blocks)


@mutant("KEY_IDENTITY", "vllm#42119", scene=WHOLE_BLOCKS)
def key_of_the_block_before(touch: Touch) -> Sequence[Patch]:
    """A chunk's key is the hash of its second-to-last block, so chunks that differ in the last block share keys."""
    return [_keys_moved(touch, -1)]


@mutant("KEY_IDENTITY", "vllm#42119", scene=WHOLE_BLOCKS)
def key_of_the_block_after(touch: Touch) -> Sequence[Patch]:
    """If a full block follows a chunk, the chunk's key is the hash of that block, not of the chunk's last block."""
    return [_keys_moved(touch, 1)]


@mutant("KEY_IDENTITY", "vllm#42119", "LMCache#1380", scene=WHOLE_BLOCKS)
def key_of_another_request(touch: Touch) -> Sequence[Patch]:
    """A request gets the chunk keys of another request: the one for which the connector computed keys just before."""
    from kvledger.adapters.vllm.chunk_keys import ChunkKeySource

    before: dict[int, Any] = {}

    def keys(original: Any, source: ChunkKeySource, request: Any, first_chunk: int, parent: Any) -> Any:
        own = original(source, request, first_chunk, parent)
        other = before.get(id(source), request)
        before[id(source)] = request
        if first_chunk or other.request_id == request.request_id:
            return own
        theirs = original(source, other, first_chunk, parent)[: len(own)]
        if theirs != own[: len(theirs)]:
            touch()
        return (*theirs, *own[len(theirs) :])

    return [wrapped(ChunkKeySource, "keys", keys)]


@mutant("KEY_IDENTITY", "vllm#42119", scene=Worlds(connector=(("chunk_size", 8),)))
def key_without_its_last_tokens(touch: Touch) -> Sequence[Patch]:
    """If a block holds several chunks, the key of the last one does not cover the second half of that chunk."""
    from sim.world import World

    from kvledger.adapters.vllm.chunk_keys import ChunkKeySource

    right_of: dict[bytes, bytes] = {}

    def keys(original: Any, source: ChunkKeySource, request: Any, first_chunk: int, parent: Any) -> Any:
        right = original(source, request, first_chunk, None if parent is None else right_of[parent])
        hash_tokens = source._hash_tokens
        source._hash_tokens = lambda its, after, start, end: hash_tokens(
            its, after, start, end if end % source.hash_block_size else (start + end) // 2
        )
        try:
            made = original(source, request, first_chunk, parent)
        finally:
            source._hash_tokens = hash_tokens
        for wrong, key in zip(made, right, strict=True):
            if right_of.setdefault(wrong, key) != key:
                touch()
        return made

    def prompt(original: Any, world: Any, rng: Any, num_tokens: int) -> list[int]:
        """Make prompts differ only in the last tokens of a block."""
        drawn: list[int] = original(world, rng, num_tokens)
        return [*world._shared_prefix[:12], *drawn[12:]] if len(drawn) > 16 else drawn

    return [wrapped(ChunkKeySource, "keys", keys), wrapped(World, "prompt", prompt)]


AS_IN_VLLM = wrapped(RequestReader, "block_table", lambda *_: None)
"""The scheduler's own table has the same blocks, so the connector finds no difference."""


def block_of_another(projections: Projections, ordinal: int) -> int | None:
    """Return the last block of another request that computes, or None."""
    for record in projections.tracker:
        is_computing = record.state in {RequestState.CHUNKED_PREFILL, RequestState.RUNNING}
        held = record.block_ids or ()
        if record.ordinal != ordinal and is_computing and held and record.first is not FirstRegion.COMPUTES_FIRST:
            return int(held[-1])
    return None


@mutant("NEW_BLOCK_EXCLUSIVE", "vllm#46595", scene=WITHIN_STEPS)
def block_of_another_appended(touch: Touch) -> Sequence[Patch]:
    """A request's block table grows by a block that another running request writes to."""

    def extended(original: Any, reader: StepReader, cached: Any) -> Any:
        changed = []
        for ordinal, block_ids in original(reader, cached):
            block_id = block_of_another(reader._projections, ordinal)
            if block_id is not None:
                touch()
            changed.append((ordinal, block_ids if block_id is None else (block_id, *block_ids[1:])))
        return changed

    return [wrapped(StepReader, "_extended", extended), AS_IN_VLLM]


@mutant("NEW_BLOCK_EXCLUSIVE", "vllm#46595", scene=WITHIN_STEPS)
def block_of_another_given(touch: Touch) -> Sequence[Patch]:
    """An admitted request gets a block that another running request writes to."""

    def observe(original: Any, ledger: Ledger, event: e.Event) -> Any:
        if isinstance(event, e.BlocksAllocated) and not event.num_external_tokens and event.block_ids:
            record = ledger.projections.tracker.get(event.request_id)
            block_id = None if record is None else block_of_another(ledger.projections, record.ordinal)
            is_computing = record is not None and record.state in {RequestState.NEW, RequestState.PREEMPTED}
            if block_id is not None and block_id not in event.block_ids and is_computing:
                touch()
                event = msgspec.structs.replace(event, block_ids=(*event.block_ids[:-1], block_id))
        return original(ledger, event)

    return [wrapped(Ledger, "observe", observe), AS_IN_VLLM]
