"""Positions of tokens: chunks in blocks, blocks of several groups in one table, and what sliding windows see.

kvledger matches chunks and copies *pages*. A page is one block of one group of layers. Either the chunk size is a
multiple of the block size, or the reverse. A chunk larger than a block has several pages. A chunk smaller than a block
shares its page with the other chunks in the block. The *image* of such a chunk is a copy of the page in which the
tokens up to the end of the chunk are valid. A longer image of the same block replaces a shorter one.

Hybrid models have one block table per group of layers. kvledger interleaves these tables in one flat table, in which
each page has the index `block * num_groups + group`. With one group, a page is a block. In a group with a window, vLLM
keeps only the pages of the last tokens. It frees the other pages as it processes tokens
(`v1/core/single_type_kv_cache_manager.py`, 0.32).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs


@attrs.frozen
class Windows:
    """Sliding windows of the groups of layers: which pages vLLM keeps, and which pages a load must copy."""

    block_size: int
    sizes: tuple[int, ...] = (0,)
    """For each group, the number of tokens that a token sees, including itself; 0: it sees all tokens before it."""
    num_groups: int = attrs.field(init=False, repr=False)
    """Groups of layers, each with its own block table."""
    has_any: bool = attrs.field(init=False, repr=False)
    """Whether any group has a window."""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "num_groups", len(self.sizes))
        object.__setattr__(self, "has_any", any(self.sizes))

    def first_block(self, group: int, num_tokens: int) -> int:
        """Return the index of the first block that the token after the first `num_tokens` tokens sees.

        vLLM frees earlier blocks when it has processed these `num_tokens` tokens.
        """
        size = self.sizes[group]
        return max(0, num_tokens - size + 1) // self.block_size if size else 0

    def pages(self, blocks: range) -> range:
        """Return the pages of these blocks in all groups."""
        return range(blocks.start * self.num_groups, blocks.stop * self.num_groups)

    def pages_seen(self, num_tokens: int, blocks: range) -> Iterator[int]:
        """Yield the pages of these blocks that the token after the first `num_tokens` tokens sees, ascending."""
        first_blocks = [self.first_block(group, num_tokens) for group in range(self.num_groups)]
        for block in blocks:
            for group, first_block in enumerate(first_blocks):
                if block >= first_block:
                    yield block * self.num_groups + group

    def last_boundary(self, num_tokens: int, step: int, is_stored: Callable[[int, int], bool]) -> int:
        """Return the length of the longest prefix after which the next token sees only stored pages.

        Only groups with a window are checked. All pages of the other groups are assumed to be stored.

        Args:
            num_tokens: largest length of the prefix.
            step: the chunk size. The length is `num_tokens` or a smaller multiple of `step`.
            is_stored: whether the page (first argument) is stored with all of its tokens that belong to a prefix of
                this length (second argument).
        """
        end = num_tokens if self.has_any else 0
        while end:
            missing = self._first_missing(end, is_stored)
            if missing is None:
                return end
            # Every longer prefix sees that block too. A prefix that ends inside it may need only a shorter image.
            end = min(end, (missing + 1) * self.block_size) - 1
            end -= end % step
        return 0 if self.has_any else num_tokens

    def _first_missing(self, end: int, is_stored: Callable[[int, int], bool]) -> int | None:
        missing = None
        for group, size in enumerate(self.sizes):
            if not size:
                continue
            last_block = -(-end // self.block_size) if missing is None else missing
            for block in range(self.first_block(group, end), last_block):
                if not is_stored(block * self.num_groups + group, end):
                    missing = block
                    break
        return missing


@attrs.frozen
class Geometry:
    """Converts between tokens, chunks, blocks and pages. Sizes are in tokens, indices count from the first token."""

    block_size: int
    chunk_size: int
    window_sizes: tuple[int, ...] = (0,)
    windows: Windows = attrs.field(init=False, repr=False)
    chunks_share_blocks: bool = attrs.field(init=False, repr=False)
    """Whether chunks are smaller than a block, so that several chunks share one page."""
    pages_per_chunk: int = attrs.field(init=False, repr=False)
    """Number of pages of one chunk in all groups, including pages that it shares with other chunks."""

    def __attrs_post_init__(self) -> None:
        num_blocks = max(1, self.chunk_size // self.block_size)
        object.__setattr__(self, "chunks_share_blocks", self.chunk_size < self.block_size)
        object.__setattr__(self, "pages_per_chunk", num_blocks * len(self.window_sizes))
        object.__setattr__(self, "windows", Windows(self.block_size, self.window_sizes))

    # --- chunks of tokens ----------------------------------------------------------------------

    def num_chunks_in(self, num_tokens: int) -> int:
        """Return the number of whole chunks in the first `num_tokens` tokens."""
        return num_tokens // self.chunk_size

    def num_chunks_touched(self, num_tokens: int) -> int:
        """Return the number of chunks that contain one of the first `num_tokens` tokens."""
        return -(-num_tokens // self.chunk_size)

    def chunks_of_load(self, first_token: int, num_tokens: int, num_known: int) -> range:
        """Return the chunks that a load of these tokens touches, but no chunk after the first one without a known key.

        That chunk may contain a tail, and no load needs later chunks. The limit is for damaged logs, which may have
        any numbers.

        Args:
            first_token: the first token of the load.
            num_tokens: number of tokens of the load.
            num_known: number of chunks whose keys are known.
        """
        first = max(0, first_token // self.chunk_size)
        end = -(-(first_token + num_tokens) // self.chunk_size)
        return range(first, min(end, max(first, num_known) + 1))

    def earlier_chunks(self, chunks: Iterable[int], num_known: int) -> list[int]:
        """Return the chunks that share a block with one of these chunks and come before it, in ascending order.

        The image of a later chunk in a block contains these earlier chunks, too. The given chunks are left out, and so
        are all chunks from `num_known` on.
        """
        if not self.chunks_share_blocks:
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

    # --- blocks and pages of chunks ------------------------------------------------------------

    def blocks_of(self, chunks: Iterable[int]) -> tuple[int, ...]:
        """Return the indices of the blocks that hold tokens of these chunks, ascending and without repetitions."""
        if self.chunks_share_blocks:
            return tuple(sorted({chunk * self.chunk_size // self.block_size for chunk in chunks}))
        blocks = self.chunk_size // self.block_size
        return tuple([block for chunk in chunks for block in range(chunk * blocks, (chunk + 1) * blocks)])

    def pages_of(self, chunks: Sequence[int]) -> Sequence[int]:
        """Return the pages that the chunks need in all groups, as ascending indices in the flat table."""
        num_pages = self.pages_per_chunk
        if self.chunks_share_blocks:
            blocks, num_groups = self.blocks_of(chunks), len(self.window_sizes)
            if num_groups == 1:
                return blocks
            return tuple(block * num_groups + group for block in blocks for group in range(num_groups))
        if num_pages == 1:  # one group, and a chunk is a block
            return chunks
        if len(chunks) == 1 or _is_run(chunks):
            return range(chunks[0] * num_pages, (chunks[-1] + 1) * num_pages)
        return [page for chunk in chunks for page in range(chunk * num_pages, (chunk + 1) * num_pages)]

    def pages_for(self, chunks: Sequence[int], num_slots: int) -> Sequence[int]:
        """Return the pages of the chunks, as `pages_of` does. Pages after the first `num_slots` may be left out.

        Use this for copies in a log. In a damaged log, a copy may name far more chunks than it has slots for.
        """
        return self.pages_of(chunks if self.chunks_share_blocks else chunks[: -(-num_slots // self.pages_per_chunk)])

    def place_of(self, page: int, num_chunks: int) -> tuple[int, int]:
        """Return the last chunk with tokens in `page`, and the index of the page among the chunk's pages.

        Only the first `num_chunks` chunks are considered.
        """
        if not self.chunks_share_blocks:
            return divmod(page, self.pages_per_chunk)
        block, place = divmod(page, len(self.window_sizes))
        return min((block + 1) * (self.block_size // self.chunk_size), num_chunks) - 1, place

    # --- blocks and pages of tokens ------------------------------------------------------------

    def blocks_spanning(self, first_token: int, num_tokens: int) -> range:
        """Return the indices of the blocks that hold tokens `first_token` to `first_token + num_tokens - 1`."""
        return range(first_token // self.block_size, -(-(first_token + num_tokens) // self.block_size))

    def pages_spanning(self, first_token: int, num_tokens: int) -> range:
        """Return the indices of the pages of the blocks that hold these tokens."""
        return self.windows.pages(self.blocks_spanning(first_token, num_tokens))

    # --- slots of chunks and pages -------------------------------------------------------------

    def slots_of(self, chunk: int, slot_of_page: Mapping[int, int]) -> tuple[int, ...] | None:
        """Return the slots of the chunk's pages; None if a page has no slot. `slot_of_page`: page → its slot."""
        pages = self.pages_of((chunk,))
        if not all(page in slot_of_page for page in pages):
            return None
        return tuple([slot_of_page[page] for page in pages])

    def slots_of_pages(self, pages: range, slots: tuple[int, ...]) -> tuple[int, ...]:
        """Return for each page the slot of its last chunk. `slots` are the slots of all chunks, from chunk 0 on."""
        if not self.chunks_share_blocks:
            return slots[pages.start : pages.stop]
        num_chunks = len(slots) // self.pages_per_chunk
        places = (self.place_of(page, num_chunks) for page in pages)
        return tuple([slots[chunk * self.pages_per_chunk + place] for chunk, place in places])


def _is_run(numbers: Sequence[int]) -> bool:
    """Whether the numbers are consecutive, as for nearly all chunks that are saved together."""
    return len(numbers) > 0 and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))


def blocks_at(pages: Sequence[int], table: Sequence[int]) -> tuple[int, ...]:
    """Return the block ids of these pages of the flat table. The pages must be distinct, ascending and in the table."""
    num_pages = len(pages)
    if num_pages == 1:
        return (table[pages[0]],)
    if num_pages and pages[-1] - pages[0] < num_pages:  # without a gap: one piece of the table
        blocks = table[pages[0] : pages[-1] + 1]
        return tuple(blocks.tolist() if type(blocks) is array else blocks)  # `tolist` is faster
    return tuple([table[page] for page in pages])


def interleave(tables: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the block tables of all groups as one flat table.

    Raises:
        ValueError: the tables have different lengths, so an index would not name the same tokens in all of them.
    """
    if len(tables) == 1:
        return tuple(tables[0])
    if len(set(map(len, tables))) > 1:
        message = (
            f"the block tables of {len(tables)} groups must have the same length, but have "
            f"{', '.join(map(str, map(len, tables)))} entries"
        )
        raise ValueError(message)
    return tuple(block_id for row in zip(*tables, strict=True) for block_id in row)


def keys_at(chunks: Sequence[int], keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the keys of these chunks. A log may name chunks without a key, which are left out."""
    if max(chunks, default=-1) >= len(keys):
        chunks = [chunk for chunk in chunks if chunk < len(keys)]
    return tuple(map(keys.__getitem__, chunks))
