"""Every key depends on vLLM's hash seed (`PYTHONHASHSEED`), and weak hash algorithms are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import CacheConfig, DeviceConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from kvledger.adapters.lab.simulation.engine import kv_cache_config, vllm_config
from kvledger.adapters.vllm import KVLedgerConnector, versions
from kvledger.adapters.vllm.chunk_keys import KEY_BYTES, ChunkKeySource
from kvledger.lifecycle import ConfigurationError

pytestmark = pytest.mark.scheduler

HASH_BLOCK_SIZE = 16
WEAK = [pytest.param(name, marks=pytest.mark.xxhash) for name in ("xxhash", "xxhash_cbor")]
ALGORITHMS = ["sha256", "sha256_cbor", *WEAK]
CHUNK_SIZES = [1, 4, 8, 16, 32, 48]
TRANSFER = {
    "kv_connector": "KVLedgerConnector",
    "kv_connector_module_path": "kvledger.adapters.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"log_dir": None},
}
EMBEDS = torch.arange(96 * 4, dtype=torch.float16).reshape(96, 4)


@pytest.fixture
def start_hashing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str | None], Callable[..., Any]]:
    """Does what the engine core does after it has created the connector; returns the hash function."""
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)

    def started(algorithm: str, seed: str | None) -> Callable[..., Any]:
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        hash_function = get_hash_fn_by_name(algorithm)
        kv_cache_utils.init_none_hash(hash_function)
        return hash_function

    return started


def source(algorithm: str, chunk_size: int) -> ChunkKeySource:
    """As the connector creates it."""
    cache = CacheConfig(block_size=HASH_BLOCK_SIZE, prefix_caching_hash_algo=algorithm)  # type: ignore[arg-type]
    return ChunkKeySource(
        chunk_size=chunk_size,
        hash_block_size=HASH_BLOCK_SIZE,
        hash_tokens=versions.token_hasher(VllmConfig(cache_config=cache, device_config=DeviceConfig("cpu"))),
    )


def request(hash_function: Callable[..., Any], token_ids: list[int], **inputs: Any) -> Request:
    """A request whose blocks vLLM hashes."""
    return Request(
        request_id="request",
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=kv_cache_utils.get_request_block_hasher(HASH_BLOCK_SIZE, hash_function),
        **inputs,
    )


@pytest.mark.parametrize("inputs", [{}, {"prompt_embeds": EMBEDS}], ids=["tokens", "embeddings"])
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_key_depends_on_the_hash_seed(
    start_hashing: Any, algorithm: str, chunk_size: int, inputs: dict[str, Any]
) -> None:
    """Security review: below the hash block, keys were chained from a constant, whatever PYTHONHASHSEED was."""
    found = []
    for seed in ("1234", "5678", "1234"):
        keys = source(algorithm, chunk_size)  # the engine core resolves the seed after it has created the connector
        hash_function = start_hashing(algorithm, seed)
        found.append(keys.keys(request(hash_function, [7] * 96, **inputs), 0, None))
    assert len(found[0]) == len(set(found[0])) == 96 // chunk_size
    assert not set(found[0]) & set(found[1])
    assert found[0] == found[2]


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("algorithm", WEAK)
def test_keys_keep_the_random_seed_of_a_weak_hash(start_hashing: Any, algorithm: str, chunk_size: int) -> None:
    """Security review: vLLM gives xxhash a random seed if PYTHONHASHSEED is not set; kvledger dropped it."""
    found = [
        source(algorithm, chunk_size).keys(request(start_hashing(algorithm, None), [7] * 96), 0, None) for _ in range(2)
    ]
    assert not set(found[0]) & set(found[1])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(token_ids=st.lists(st.integers(0, 200_000), max_size=70), salt=st.none() | st.text(min_size=1))
def test_the_key_of_a_chunk_that_is_a_hash_block_is_vllm_s_hash(
    algorithm: str, token_ids: list[int], salt: str | None
) -> None:
    """Cut to 16 bytes. Routers that know vLLM's hashes can find such chunks."""
    hash_function = get_hash_fn_by_name(algorithm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache_utils, "NONE_HASH", hash_function("a seed"), raising=False)
        salted = request(hash_function, token_ids, cache_salt=salt)
        keys = source(algorithm, HASH_BLOCK_SIZE).keys(salted, 0, None)
    assert list(keys) == [bytes(block_hash)[:KEY_BYTES] for block_hash in salted.block_hashes]


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_hash_for_which_collisions_can_be_crafted_is_refused(algorithm: str, role: KVConnectorRole) -> None:
    """Two prompts with the same key get each other's KV. The refusal names the option, the reason and the remedy."""
    settings = vllm_config(num_blocks=20, kv_transfer=TRANSFER)
    settings.cache_config.prefix_caching_hash_algo = algorithm  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match=f"prefix_caching_hash_algo: '{algorithm}': ") as caught:
        KVLedgerConnector(settings, role, kv_cache_config(20, 16))
    assert "another tenant's KV" in str(caught.value)
    assert "--prefix-caching-hash-algo sha256" in str(caught.value)


@pytest.mark.parametrize("seed", [None, "424242"])
def test_a_start_says_once_whether_a_reader_of_the_log_could_guess_prompts(
    make_engine: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    seed: str | None,
) -> None:
    """Not for a log in memory, which nobody else reads."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    caplog.set_level("INFO", "vllm.kvledger")
    for log_dir in (tmp_path, None):
        make_engine(num_blocks=8, chunk_size=16, log_dir=log_dir, num_ranks=2)
    said = [record.getMessage() for record in caplog.records if "can guess prompts" in record.getMessage()]
    assert len(said) == (seed is None)
    assert all("PYTHONHASHSEED is not set" in each for each in said)
