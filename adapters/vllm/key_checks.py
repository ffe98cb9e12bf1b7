"""What the log holds against each chunk key: the beginning of vLLM's own hash of the chunk's last block.

It is read from the request once more, with an index of its own. It must not know how keys are made (`chunk_keys`): a
mistake there must not be made here, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.v1.request import Request

NUM_BYTES: Final = 4
"""Of each hash."""


class KeyChecks:
    """Reads check values from a live request."""

    def __init__(self, *, chunk_size: int, hash_block_size: int) -> None:
        """Both in tokens: of a chunk, and of one of vLLM's block hashes (`Request.block_hashes`)."""
        self._chunk_size = chunk_size
        self._hash_block_size = hash_block_size

    def hash_prefixes(self, request: Request, first_chunk: int, num_chunks: int) -> bytes:
        """The first bytes of the hash of the last block that ends within each of these chunks or before it.

        `NUM_BYTES` for each chunk, one after the other: zeros where no block has ended, or vLLM has no hash of it.
        """
        hashes, block_size = request.block_hashes, self._hash_block_size
        first_end = (first_chunk + 1) * self._chunk_size
        ends = range(first_end, first_end + num_chunks * self._chunk_size, self._chunk_size)
        known_to = (len(hashes) + 1) * block_size
        none = bytes(NUM_BYTES)
        return b"".join(
            [hashes[end // block_size - 1][:NUM_BYTES] if block_size <= end < known_to else none for end in ends]
        )

    def are_block_hashes(self, request: Request) -> bool:
        """Whether a key of this request has to be vLLM's hash itself: it hashes all that the KV of a chunk depends on.

        It does for chunks of whole blocks, without an adapter, a pooling request and given embeddings (see
        `versions.unhashed_inputs`).
        """
        others = (request.lora_request, request.pooling_params, request.prompt_embeds, request.prompt_is_token_ids)
        return self._chunk_size % self._hash_block_size == 0 and all(each is None for each in others)
