"""Chunk keys: vLLM's own block hashes where chunks are whole blocks, the same hash, chained, where they are smaller."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, DeviceConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.chunk_keys import KEY_BYTES, ChunkKeySource
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


def keys_of(engine: Any, request: Any, first_chunk: int = 0, parent: bytes | None = None) -> tuple[bytes, ...]:
    """From the source that the engine's connector uses."""
    source = engine.connector.scheduler_side.request_reader._keys
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


TENSOR = torch.arange(100 * 4, dtype=torch.float16).reshape(100, 4)
ADAPTER = {"lora_name": "adapter", "lora_path": "/adapter"}


def source_of(engine: Any, *, vllm_shares_blocks: bool) -> ChunkKeySource:
    """As the engine's connector makes it."""
    config = VllmConfig(cache_config=CacheConfig(block_size=16), device_config=DeviceConfig("cpu"))
    return ChunkKeySource(
        chunk_size=engine.connector.scheduler_side.journal.configuration.chunk_size,
        hash_block_size=16,
        hash_tokens=versions.token_hasher(config),
        vllm_shares_blocks=vllm_shares_blocks,
    )


def request_with(engine: Any, **inputs: Any) -> Request:
    """A request of 100 times token 0 that differs from others in these inputs only."""
    given: dict[str, Any] = {"prompt_token_ids": [0] * 100, "pooling_params": None, **inputs}
    sampling = None if given["pooling_params"] else SamplingParams(max_tokens=4)
    return Request("request", sampling_params=sampling, block_hasher=engine._block_hasher, **given)


DIFFERENT_INPUTS: list[dict[str, Any]] = [
    {},
    {"prompt_embeds": TENSOR, "prompt_is_token_ids": [False] * 16 + [True] * 84},
    {"prompt_embeds": TENSOR, "prompt_is_token_ids": [False] * 15 + [True] * 85},
    {"prompt_embeds": TENSOR, "prompt_is_token_ids": [True] * 100},
    {"prompt_embeds": TENSOR, "prompt_is_token_ids": [False] * 100},
    {"prompt_embeds": TENSOR},
    {"prompt_embeds": TENSOR, "prompt_token_ids": None},
    {"prompt_embeds": TENSOR.view(torch.bfloat16), "prompt_token_ids": None},
    {"prompt_embeds": TENSOR.view(torch.int16), "prompt_token_ids": None},
    {"lora_request": LoRARequest(lora_int_id=1, **ADAPTER)},
    {"lora_request": LoRARequest(lora_int_id=2, **ADAPTER)},
    {"pooling_params": PoolingParams(extra_kwargs={"compressed_token_type_ids": 7})},
    {"pooling_params": PoolingParams(extra_kwargs={"compressed_token_type_ids": 8})},
]


@pytest.mark.parametrize("chunk_size", [4, 16, 32])
def test_requests_with_different_inputs_share_no_key(make_engine: Any, chunk_size: int) -> None:
    """Equal token ids and tensors are not enough (vllm#56655): what takes the tensor, its type, the adapter's id."""
    engine = make_engine(num_blocks=30, chunk_size=chunk_size)
    source = source_of(engine, vllm_shares_blocks=False)
    last_keys = [source.keys(request_with(engine, **inputs), 0, None)[-1] for inputs in DIFFERENT_INPUTS]
    assert len(set(last_keys)) == len(DIFFERENT_INPUTS)


@pytest.mark.parametrize("chunk_size", [4, 16, 32])
@pytest.mark.parametrize("inputs", DIFFERENT_INPUTS[1:])
def test_keys_of_unusual_inputs_do_not_depend_on_when_they_are_made(
    make_engine: Any, chunk_size: int, inputs: dict[str, Any]
) -> None:
    """The same inputs give the same keys, made at once or one by one with the key before as parent."""
    engine = make_engine(num_blocks=30, chunk_size=chunk_size)
    source = source_of(engine, vllm_shares_blocks=False)
    keys = source.keys(request_with(engine, **inputs), 0, None)
    again = request_with(engine, **inputs)
    assert len(keys) == 100 // chunk_size
    for chunk in range(1, len(keys)):
        assert source.keys(again, chunk, keys[chunk - 1]) == keys[chunk:]


def test_prompts_with_embeddings_share_keys_up_to_the_first_difference(make_engine: Any) -> None:
    """Another placement in the third block changes the keys from there on; a longer mask says the same as a shorter."""
    engine = make_engine(num_blocks=30, chunk_size=16)
    source = source_of(engine, vllm_shares_blocks=False)
    mask = [False] * 16 + [True] * 84
    other = [*mask[:40], False, *mask[41:]]
    keys, others, shorter = (
        source.keys(request_with(engine, prompt_embeds=TENSOR, prompt_is_token_ids=each), 0, None)
        for each in (mask, other, mask)
    )
    assert keys == shorter
    assert keys[:2] == others[:2]
    assert not set(keys[2:]) & set(others[2:])


@pytest.mark.parametrize("chunk_size", [4, 16])
def test_a_request_that_vllm_s_prefix_cache_may_mix_up_has_no_keys(make_engine: Any, chunk_size: int) -> None:
    """VLLM may give a request with embeddings the blocks of another one: kvledger must not save those (vllm#56655)."""
    engine = make_engine(num_blocks=30, chunk_size=chunk_size)
    source = source_of(engine, vllm_shares_blocks=True)
    for inputs in DIFFERENT_INPUTS:
        request = request_with(engine, **inputs)
        assert bool(source.keys(request, 0, None)) is not bool(source.why_uncached(request))
        assert bool(source.why_uncached(request)) is ("prompt_embeds" in inputs)


@pytest.mark.parametrize("vllm_shares_blocks", [False, True])
def test_a_request_that_loads_its_adapter_again_has_no_keys(make_engine: Any, *, vllm_shares_blocks: bool) -> None:
    """With `load_inplace` name, path and id stay the same, and the weights may be others (vllm#42125)."""
    engine = make_engine(num_blocks=30, chunk_size=16)
    source = source_of(engine, vllm_shares_blocks=vllm_shares_blocks)
    request = request_with(engine, lora_request=LoRARequest(lora_int_id=1, load_inplace=True, **ADAPTER))
    assert source.keys(request, 0, None) == ()
    assert "load_inplace" in source.why_uncached(request)


def test_the_log_says_once_why_requests_with_embeddings_are_not_cached(make_engine: Any) -> None:
    """`why` finds no key; the note says that vLLM's prefix cache is the reason, and what to set."""
    engine = make_engine(num_blocks=30, chunk_size=16, enable_prefix_caching=True)
    for name in ("one", "two"):
        request = request_with(engine, prompt_embeds=TENSOR)
        request.request_id = name
        engine.connector.on_new_request(request)
        assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
        engine.connector.request_finished(request, [])
    notes = [note.text for note in engine.logged(e.LogNote) if "not cached" in note.text]
    assert notes == [note for note in notes if note.startswith("one is not cached: it has prompt embeddings")]
    assert "enable_prefix_caching=False" in notes[0]
    assert engine.logged(e.ChunkKeysObserved) == []
