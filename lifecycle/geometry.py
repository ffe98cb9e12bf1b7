"""Where chunks lie on blocks: the unit of matching is the chunk, the unit of bytes is the block page.

They are independent as long as one divides the other. A chunk larger than a block is several pages; a chunk
that ends inside a block is an image of that block's page of which only the first tokens are valid, and a
longer image of the same block replaces a shorter one.

Where a model has several groups of layers, every group has a page of its own for each block; see `windows.py` for how
pages are numbered. With one group a page is a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from kvledger.lifecycle.windows import Windows


@attrs.frozen
class Geometry:
    """Sizes in tokens; chunks, blocks and pages are counted from the request's first token."""

    block_size: int
    chunk_size: int
    window_sizes: tuple[int, ...] = (0,)
    windows: Windows = attrs.field(init=False, repr=False)
    pages_per_chunk: int = attrs.field(init=False, repr=False)
    """Pages of one chunk in all groups; 0 where a chunk ends inside a block."""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "pages_per_chunk", self.chunk_size // self.block_size * len(self.window_sizes))
        object.__setattr__(self, "windows", Windows(self.block_size, self.window_sizes))

    def blocks_of(self, chunks: Iterable[int]) -> tuple[int, ...]:
        """Indices into the block table of the pages that the chunks need, ascending, each once."""
        if self.chunk_size >= self.block_size:
            pages = self.chunk_size // self.block_size
            return tuple([block for chunk in chunks for block in range(chunk * pages, (chunk + 1) * pages)])
        return tuple(sorted({chunk * self.chunk_size // self.block_size for chunk in chunks}))

    def pages_of(self, chunks: Sequence[int]) -> Sequence[int]:
        """Indices into the flat block table of the pages that the chunks need in all groups, ascending, each once."""
        pages_per_chunk = self.pages_per_chunk
        if pages_per_chunk == 1:  # one group, and a chunk is a block
            return chunks
        if pages_per_chunk and len(chunks) == 1:
            first_page = chunks[0] * pages_per_chunk
            return range(first_page, first_page + pages_per_chunk)
        if pages_per_chunk:
            return [page for chunk in chunks for page in range(chunk * pages_per_chunk, (chunk + 1) * pages_per_chunk)]
        blocks = self.blocks_of(chunks)
        num_groups = len(self.window_sizes)
        if num_groups == 1:
            return blocks
        return tuple(block * num_groups + group for block in blocks for group in range(num_groups))

    def pages_for(self, chunks: Sequence[int], num_slots: int) -> Sequence[int]:
        """Pages of the chunks as `pages_of`, at least the first `num_slots` of them; the rest may be left out.

        For recorded copies, which may name more chunks than they have slots for.
        """
        pages_per_chunk = self.pages_per_chunk
        return self.pages_of(chunks[: -(-num_slots // pages_per_chunk)] if pages_per_chunk else chunks)

    def chunks_of_load(self, first_token: int, num_tokens: int, num_known: int) -> range:
        """Chunks that a load of these tokens touches, at most one behind the `num_known` whose keys are known.

        A load ends at the latest inside the chunk behind the last known one. A recorded load may say anything.
        """
        first = max(0, first_token // self.chunk_size)
        end = -(-(first_token + num_tokens) // self.chunk_size)
        return range(first, min(end, max(first, num_known) + 1))

    def pages_spanning(self, first_token: int, num_tokens: int) -> range:
        """Indices of the pages of the blocks that hold these tokens."""
        return self.windows.pages(self.blocks_spanning(first_token, num_tokens))

    def slots_of(self, chunk: int, slot_of_page: Mapping[int, int]) -> tuple[int, ...] | None:
        """The slots that hold `chunk`, given the slots of pages; None where one of its pages has none."""
        pages = self.pages_of((chunk,))
        if not all(page in slot_of_page for page in pages):
            return None
        return tuple([slot_of_page[page] for page in pages])

    def earlier_chunks(self, chunks: Iterable[int], num_known: int) -> list[int]:
        """Chunks that end earlier inside the blocks of these chunks, ascending, without these, below `num_known`.

        An image of a block with a chunk in it contains them too.
        """
        if self.chunk_size >= self.block_size:
            return []
        chunks_per_block = self.block_size // self.chunk_size
        last_of_block: dict[int, int] = {}
        for chunk in chunks:
            block = chunk // chunks_per_block
            last_of_block[block] = max(chunk, last_of_block.get(block, 0))
        earlier: set[int] = set()
        for block, last in last_of_block.items():
            earlier.update(range(block * chunks_per_block, min(last, num_known)))
        return sorted(earlier.difference(chunks))

    def place_of(self, page: int, num_chunks: int) -> tuple[int, int]:
        """The chunk among the first `num_chunks` with the longest image of `page`, and where among its pages it is."""
        num_groups = len(self.window_sizes)
        if self.chunk_size >= self.block_size:
            return divmod(page, self.chunk_size // self.block_size * num_groups)
        chunks_per_block = self.block_size // self.chunk_size
        return min((page // num_groups + 1) * chunks_per_block, num_chunks) - 1, page % num_groups

    def blocks_spanning(self, first_token: int, num_tokens: int) -> range:
        """Indices of the blocks that hold tokens `first_token` to `first_token + num_tokens - 1`."""
        return range(first_token // self.block_size, -(-(first_token + num_tokens) // self.block_size))

    def num_chunks_in(self, num_tokens: int) -> int:
        """Whole chunks in the first `num_tokens` tokens."""
        return num_tokens // self.chunk_size
