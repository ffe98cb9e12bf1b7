"""Chunk keys: a hash over a chunk's tokens and everything before them, with salt, adapter and media in it.

Where a chunk is a multiple of vLLM's hash block, its key is vLLM's own chained block hash. Smaller chunks get a
chained hash of their own, made with the same function over the same extra keys. Two tenants with different
`cache_salt` therefore never share a chunk. Keys are cut to 16 bytes: 128 bits are enough to be distinct.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

KEY_BYTES = 16
_ROOT = b"kvledger"


class ChunkKeySource:
    """Reads keys from a live request. It keeps nothing: the parent of a key comes from the caller."""

    def __init__(
        self, *, chunk_size: int, hash_block_size: int, hash_tokens: Callable[[Request, bytes, int, int], bytes]
    ) -> None:
        self._chunk_size = chunk_size
        self._hash_tokens = hash_tokens
        self._hashes_per_chunk = chunk_size // hash_block_size if chunk_size % hash_block_size == 0 else 0

    def keys(self, request: Request, first_chunk: int, parent: bytes | None) -> tuple[bytes, ...]:
        """The keys of all whole chunks of the request's known tokens from `first_chunk` on.

        Args:
            request: read now, not kept.
            first_chunk: index of the first key wanted.
            parent: key of the chunk before it; None for the first chunk.
        """
        if self._hashes_per_chunk:
            hashes = request.block_hashes
            step = self._hashes_per_chunk
            return tuple([bytes(hashes[i])[:KEY_BYTES] for i in range((first_chunk + 1) * step - 1, len(hashes), step)])
        keys = []
        previous = parent or _ROOT
        for chunk in range(first_chunk, request.num_tokens // self._chunk_size):
            start = chunk * self._chunk_size
            previous = self._hash_tokens(request, previous, start, start + self._chunk_size)[:KEY_BYTES]
            keys.append(previous)
        return tuple(keys)
