"""Computes chunk keys: hashes of a chunk's tokens and all tokens before them, with salt, adapter and media.

If the chunk size is a multiple of vLLM's hash block size, a chunk's key is vLLM's own chained hash of the chunk's last
block. For other chunk sizes, kvledger computes chained hashes itself, with vLLM's hash function, vLLM's extra keys, and
the hash with which vLLM begins every chain. Two tenants with different `cache_salt` therefore never share a chunk. If
`PYTHONHASHSEED` is set, every key depends on it. Keys are cut to 16 bytes, because 128 bits are enough to tell chunks
apart.

vLLM's hash leaves out some inputs that the KV depends on (`versions.unhashed_inputs`). kvledger hashes these inputs
into the keys of the requests that have them. If no key can identify the KV of a request, the request gets no keys and
is not cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvledger.adapters.vllm import versions

if TYPE_CHECKING:
    from vllm.v1.request import Request

KEY_BYTES = 16


class ChunkKeySource:
    """Computes the keys of a live request. Keeps no keys, so the caller passes the key of the previous chunk."""

    def __init__(
        self,
        *,
        chunk_size: int,
        hash_block_size: int,
        hash_tokens: Callable[[Request, bytes, int, int], bytes],
        vllm_shares_blocks: bool = False,
    ) -> None:
        """Compute keys of chunks of this size.

        Args:
            chunk_size: tokens of a chunk.
            hash_block_size: tokens per block hash of vLLM.
            hash_tokens: hashes a chunk if its size is not a multiple of `hash_block_size`; see `versions.token_hasher`.
            vllm_shares_blocks: whether vLLM's prefix cache is on. If it is, requests with prompt embeddings get no
                keys: vLLM's hash leaves out which positions take embeddings. vLLM may therefore give such a request
                blocks with another request's KV, which kvledger must not save.
        """
        self._chunk_size = chunk_size
        self.hash_block_size = hash_block_size
        self._hash_tokens = hash_tokens
        self._hashes_per_chunk = chunk_size // hash_block_size if chunk_size % hash_block_size == 0 else 0
        self._vllm_shares_blocks = vllm_shares_blocks

    def why_uncached(self, request: Request) -> str:
        """Return why the request gets no keys; empty if the request gets keys."""
        if versions.reloads_adapter(request):
            return "it reloads its LoRA adapter (load_inplace), so KV with the same key may come from other weights"
        if self._vllm_shares_blocks and versions.has_prompt_embeds(request):
            return (
                "it has prompt embeddings, and vLLM's prefix cache may give it blocks of another request with the same "
                "embedding tensor; to cache such requests, set enable_prefix_caching=False"
            )
        return ""

    def keys(self, request: Request, first_chunk: int, parent: bytes | None) -> tuple[bytes, ...]:
        """Return the keys of all whole chunks of the request's known tokens, from chunk number `first_chunk` on.

        `parent` is the key of the chunk before `first_chunk`; None if `first_chunk` is 0. `request` is not kept.
        """
        if self.why_uncached(request):
            return ()
        if self._hashes_per_chunk:
            return self._keys_of_blocks(request, first_chunk, parent)
        keys = []
        previous = parent or versions.root_hash()
        for chunk in range(first_chunk, request.num_tokens // self._chunk_size):
            start = chunk * self._chunk_size
            end = start + self._chunk_size
            previous = self._hash_tokens(request, previous, start, end)[:KEY_BYTES]
            if versions.has_unhashed_inputs(request):
                previous = _key(previous, versions.unhashed_inputs(request, start, end))
            keys.append(previous)
        return tuple(keys)

    def _keys_of_blocks(self, request: Request, first_chunk: int, parent: bytes | None) -> tuple[bytes, ...]:
        step = self._hashes_per_chunk
        hashes = request.block_hashes[(first_chunk + 1) * step - 1 :: step]
        if not versions.has_prompt_embeds(request):
            if not versions.has_unhashed_inputs(request):
                return tuple([bytes(block_hash)[:KEY_BYTES] for block_hash in hashes])
            return tuple([key_of_hash(request, block_hash) for block_hash in hashes])
        keys = []
        previous = parent or versions.root_hash()
        for chunk, block_hash in enumerate(hashes, first_chunk):
            # Chained, because the place of an embedding changes all KV after it.
            start = chunk * self._chunk_size
            unhashed = versions.unhashed_inputs(request, start, start + self._chunk_size)
            previous = _key(previous + bytes(block_hash), unhashed)
            keys.append(previous)
        return tuple(keys)


def key_of_hash(request: Request, block_hash: bytes) -> bytes:
    """Return the key of the chunk whose last block has this hash of vLLM.

    The request must have no prompt embeddings.
    """
    if not versions.has_unhashed_inputs(request):
        return bytes(block_hash)[:KEY_BYTES]
    return _key(bytes(block_hash), versions.unhashed_inputs(request, 0, 0))


def _key(hashed: bytes, unhashed: bytes) -> bytes:
    return hashlib.sha256(hashed + unhashed).digest()[:KEY_BYTES]
