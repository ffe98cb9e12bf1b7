"""Positions of tokens: chunks in blocks, blocks of several groups in one table, and what sliding windows see.

kvledger matches chunks and copies *pages*. A page is one block of one group of layers. Either the chunk size divides
the block size, or the reverse. A chunk larger than a block has several pages. A chunk that ends inside a block shares
its page with its neighbours. Its image is that page, of which only the first tokens are valid, and a longer image of
the same block replaces a shorter one. No other module knows that a chunk may end inside a block.

Hybrid models have one block table per group of layers. kvledger interleaves them in one flat table, so that a page is
one index: `block * num_groups + group`. With one group a page is a block. In a group with a window, only pages of the
last tokens are kept: vLLM frees the others as it processes tokens (`v1/core/single_type_kv_cache_manager.py`, 0.32).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs


@attrs.frozen
class Windows:
    """Sliding windows of the groups of layers: which pages are kept, and which ones a load must bring."""

    block_size: int
    sizes: tuple[int, ...] = (0,)
    """Per group, how many tokens a token sees, itself included; 0: all of them."""
    num_groups: int = attrs.field(init=False, repr=False)
    """Groups of layers, each with its own block table."""
    has_any: bool = attrs.field(init=False, repr=False)
    """Whether any group has a window."""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "num_groups", len(self.sizes))
        object.__setattr__(self, "has_any", any(self.sizes))

    def first_block(self, group: int, num_tokens: int) -> int:
        """Return the first block that the token after `num_tokens` sees.

        vLLM frees earlier blocks once these tokens are processed.
        """
        size = self.sizes[group]
        return max(0, num_tokens - size + 1) // self.block_size if size else 0

    def pages(self, blocks: range) -> range:
        """Return the pages of these blocks in all groups."""
        return range(blocks.start * self.num_groups, blocks.stop * self.num_groups)

    def pages_seen(self, num_tokens: int, blocks: range) -> Iterator[int]:
        """Yield the pages of these blocks that the token after `num_tokens` sees, ascending."""
        first_blocks = [self.first_block(group, num_tokens) for group in range(self.num_groups)]
        for block in blocks:
            for group, first_block in enumerate(first_blocks):
                if block >= first_block:
                    yield block * self.num_groups + group

    def last_boundary(self, num_tokens: int, step: int, is_stored: Callable[[int, int], bool]) -> int:
        """Return the longest prefix of at most `num_tokens` tokens after which everything that a window sees is stored.

        Candidates are `num_tokens` itself and the multiples of `step` (the chunk size) below it. Groups without a
        window are not checked: the prefix is assumed to be stored for them. `is_stored(page, prefix)` is whether the
        page is stored with all its tokens of that prefix.
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
    """Sizes in tokens. Chunks, blocks and pages are counted from the request's first token."""

    block_size: int
    chunk_size: int
    window_sizes: tuple[int, ...] = (0,)
    windows: Windows = attrs.field(init=False, repr=False)
    chunks_share_blocks: bool = attrs.field(init=False, repr=False)
    """Whether a chunk ends inside a block, so that several chunks share its page."""
    pages_per_chunk: int = attrs.field(init=False, repr=False)
    """Pages of one chunk in all groups, including shared ones."""

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
        """Return the chunks that a load of these tokens touches, of those known and the next one.

        A load ends at the latest inside the chunk after the `num_known` whose keys are known. A recorded load may claim
        anything.
        """
        first = max(0, first_token // self.chunk_size)
        end = -(-(first_token + num_tokens) // self.chunk_size)
        return range(first, min(end, max(first, num_known) + 1))

    def earlier_chunks(self, chunks: Iterable[int], num_known: int) -> list[int]:
        """Return the chunks that end earlier in the blocks of these chunks, ascending, without these.

        An image of a block with a later chunk contains them too. Only chunks below `num_known` are returned.
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
        """Return the indices in the block table of the blocks that the chunks need, ascending, each once."""
        if self.chunks_share_blocks:
            return tuple(sorted({chunk * self.chunk_size // self.block_size for chunk in chunks}))
        blocks = self.chunk_size // self.block_size
        return tuple([block for chunk in chunks for block in range(chunk * blocks, (chunk + 1) * blocks)])

    def pages_of(self, chunks: Sequence[int]) -> Sequence[int]:
        """Return the ascending indices in the flat table of the pages that the chunks need in all groups."""
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
        """Return at least the first `num_slots` of `pages_of`; the rest may be missing.

        For recorded copies, which may name more chunks than they have slots for.
        """
        return self.pages_of(chunks if self.chunks_share_blocks else chunks[: -(-num_slots // self.pages_per_chunk)])

    def place_of(self, page: int, num_chunks: int) -> tuple[int, int]:
        """Return the chunk of the first `num_chunks` with the longest image of `page`, and the page's place there."""
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
        """Return the slots that hold `chunk`, given the slots of pages; None if one of its pages has none."""
        pages = self.pages_of((chunk,))
        if not all(page in slot_of_page for page in pages):
            return None
        return tuple([slot_of_page[page] for page in pages])

    def slots_of_pages(self, pages: range, slots: tuple[int, ...]) -> tuple[int, ...]:
        """Return the slot with the longest image of each page, given the slots of all chunks from the first one on."""
        if not self.chunks_share_blocks:
            return slots[pages.start : pages.stop]
        num_chunks = len(slots) // self.pages_per_chunk
        places = (self.place_of(page, num_chunks) for page in pages)
        return tuple([slots[chunk * self.pages_per_chunk + place] for chunk, place in places])


def _is_run(numbers: Sequence[int]) -> bool:
    """Whether the numbers are consecutive, as for nearly all chunks that are saved together."""
    return len(numbers) > 0 and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))


def blocks_at(pages: Sequence[int], table: Sequence[int]) -> tuple[int, ...]:
    """Return the blocks of these pages. The pages are ascending, each once, and within the flat table."""
    num_pages = len(pages)
    if num_pages == 1:
        return (table[pages[0]],)
    if num_pages and pages[-1] - pages[0] < num_pages:  # without a gap: one piece of the table
        blocks = table[pages[0] : pages[-1] + 1]
        return tuple(blocks.tolist() if type(blocks) is array else blocks)  # `tolist` is faster
    return tuple([table[page] for page in pages])


def interleave(tables: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return one flat table of the groups' tables.

    Raises:
        ValueError: the tables have different lengths, so an index would not name the same tokens in all of them.
    """
    if len(tables) == 1:
        return tuple(tables[0])
    if len(set(map(len, tables))) > 1:
        message = f"the block tables of {len(tables)} groups have {', '.join(map(str, map(len, tables)))} entries"
        raise ValueError(message)
    return tuple(block_id for row in zip(*tables, strict=True) for block_id in row)


def keys_at(chunks: Sequence[int], keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the keys of those chunks that have one; a log may name others."""
    if max(chunks, default=-1) >= len(keys):
        chunks = [chunk for chunk in chunks if chunk < len(keys)]
    return tuple(map(keys.__getitem__, chunks))
