"""Chunk keys: vLLM's own block hashes where chunks are whole blocks, the same hash, chained, where they are smaller."""

from __future__ import annotations

from typing import Any

import pytest

from kvledger.adapters.vllm.chunk_keys import KEY_BYTES, ChunkKeySource

pytestmark = pytest.mark.scheduler


def keys_of(engine: Any, request: Any, first_chunk: int = 0, parent: bytes | None = None) -> tuple[bytes, ...]:
    """From the source that the engine's connector uses."""
    source = engine.connector.scheduler_side._notice._keys
    assert isinstance(source, ChunkKeySource)
    return source.keys(request, first_chunk, parent)


@pytest.mark.parametrize("chunk_size", [16, 48, 64])
def test_whole_blocks_use_vllm_s_block_hashes(make_engine: Any, chunk_size: int) -> None:
    """The key of a chunk is the chained hash of its last block, cut to 16 bytes."""
    engine = make_engine(num_blocks=30, chunk_size=chunk_size)
    request = engine.add("request", range(200), 4)
    step = chunk_size // 16
    assert keys_of(engine, request) == tuple(
        bytes(request.block_hashes[index])[:KEY_BYTES] for index in range(step - 1, len(request.block_hashes), step)
    )
    assert len(keys_of(engine, request)) == 200 // chunk_size


@pytest.mark.parametrize("chunk_size", [1, 4, 8])
def test_small_chunks_get_a_chain_of_their_own(make_engine: Any, chunk_size: int) -> None:
    """One key per whole chunk, all different, also where chunks repeat the same tokens."""
    engine = make_engine(num_blocks=30, chunk_size=chunk_size)
    request = engine.add("request", [7] * 50, 4)
    keys = keys_of(engine, request)
    assert len(keys) == len(set(keys)) == 50 // chunk_size
    assert {len(key) for key in keys} == {KEY_BYTES}


@pytest.mark.parametrize("chunk_size", [4, 8, 16, 32])
def test_the_same_prefix_has_the_same_keys(make_engine: Any, chunk_size: int) -> None:
    """Up to the chunk in which two prompts part, and not one further."""
    engine = make_engine(num_blocks=30, chunk_size=chunk_size)
    one = keys_of(engine, engine.add("one", [*range(70), 1, *range(71, 100)], 4))
    two = keys_of(engine, engine.add("two", [*range(70), 2, *range(71, 100)], 4))
    num_shared = 70 // chunk_size
    assert one[:num_shared] == two[:num_shared]
    assert not set(one[num_shared:]) & set(two[num_shared:])


@pytest.mark.parametrize("chunk_size", [4, 8, 16, 32])
def test_another_salt_changes_every_key(make_engine: Any, chunk_size: int) -> None:
    """Also the first; and a salt is not the same as none."""
    engine = make_engine(num_blocks=30, chunk_size=chunk_size)
    keys = [
        set(keys_of(engine, engine.add(str(salt), range(100), 4, cache_salt=salt))) for salt in ("one", "two", None)
    ]
    assert len(keys[0] | keys[1] | keys[2]) == 3 * (100 // chunk_size)


@pytest.mark.parametrize("chunk_size", [4, 8, 16, 32])
def test_keys_made_in_parts_are_those_made_at_once(make_engine: Any, chunk_size: int) -> None:
    """A request grows token by token; the source keeps nothing in between and gets the parent each time."""
    engine = make_engine(num_blocks=30, chunk_size=chunk_size)
    request = engine.add("growing", range(30), 60)
    known: tuple[bytes, ...] = ()
    while engine.scheduler.has_requests():
        engine.step()
        known += keys_of(engine, request, len(known), known[-1] if known else None)
    whole = engine.add("whole", [*range(30), *engine.outputs["growing"]], 1)
    assert known == keys_of(engine, whole)[: len(known)]
    assert len(known) == 90 // chunk_size
    engine.run()


def test_small_and_large_chunks_never_share_a_key(make_engine: Any) -> None:
    """Logs of engines with different chunk sizes are not confused, not even where a chunk is the whole prompt."""
    keys = []
    for chunk_size in (8, 16):
        engine = make_engine(num_blocks=30, chunk_size=chunk_size)
        keys.append(set(keys_of(engine, engine.add("request", range(64), 4))))
        engine.run()
    assert not keys[0] & keys[1]
