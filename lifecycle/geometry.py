"""Where chunks lie on blocks: the unit of matching is the chunk, the unit of bytes is the block page.

They are independent as long as one divides the other. A chunk larger than a block is several pages; a chunk
that ends inside a block is an image of that block's page of which only the first tokens are valid, and a
longer image of the same block replaces a shorter one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs


@attrs.frozen
class Geometry:
    """Sizes in tokens; chunks and blocks are counted from the request's first token."""

    block_size: int
    chunk_size: int

    def blocks_of(self, chunks: Iterable[int]) -> tuple[int, ...]:
        """Indices into the block table of the pages that the chunks need, ascending, each once."""
        if self.chunk_size >= self.block_size:
            pages = self.chunk_size // self.block_size
            return tuple(block for chunk in chunks for block in range(chunk * pages, (chunk + 1) * pages))
        return tuple(sorted({chunk * self.chunk_size // self.block_size for chunk in chunks}))

    def num_pages_more(self, chunk: int, previous: int | None) -> int:
        """How many more pages a save needs for `chunk` when it ends with `previous` so far."""
        if self.chunk_size >= self.block_size:
            return self.chunk_size // self.block_size
        same_block = previous is not None and self.blocks_of((chunk,)) == self.blocks_of((previous,))
        return 0 if same_block else 1

    def slots_of(self, chunk: int, slot_of_block: Mapping[int, int]) -> tuple[int, ...] | None:
        """The slots that hold `chunk`, given the slots of blocks; None where one of its blocks has none."""
        blocks = self.blocks_of((chunk,))
        if not all(block in slot_of_block for block in blocks):
            return None
        return tuple(slot_of_block[block] for block in blocks)

    def chunks_before_in_block(self, chunk: int) -> range:
        """Chunks that end earlier inside the same block; an image with `chunk` in it contains them too."""
        if self.chunk_size >= self.block_size:
            return range(0)
        chunks_per_block = self.block_size // self.chunk_size
        return range(chunk - chunk % chunks_per_block, chunk)

    def slot_for_block(self, block: int, num_chunks: int, slots_of_chunk: Iterable[tuple[int, ...]]) -> int:
        """The slot with the longest image of `block` among the first `num_chunks` chunks.

        `slots_of_chunk` yields the slots of each of these chunks in order.
        """
        slots = tuple(slots_of_chunk)
        if self.chunk_size >= self.block_size:
            pages = self.chunk_size // self.block_size
            return slots[block // pages][block % pages]
        chunks_per_block = self.block_size // self.chunk_size
        return slots[min((block + 1) * chunks_per_block, num_chunks) - 1][0]

    def blocks_spanning(self, first_token: int, num_tokens: int) -> range:
        """Indices of the blocks that hold tokens `first_token` to `first_token + num_tokens - 1`."""
        return range(first_token // self.block_size, -(-(first_token + num_tokens) // self.block_size))

    def num_chunks_in(self, num_tokens: int) -> int:
        """Whole chunks in the first `num_tokens` tokens."""
        return num_tokens // self.chunk_size
