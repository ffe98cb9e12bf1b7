"""Groups of layers with sliding windows: which pages are still there, and which a load must bring.

Hybrid models keep one block table per group of layers. Of a group with a window, only pages of the last tokens are
kept: vLLM frees the others as tokens are processed (`v1/core/single_type_kv_cache_manager.py`, 0.32). The tables of all
groups lie interleaved in one flat table, so that a *page* is one index: `block * num_groups + group`. With one group a
page is a block. This module does arithmetic; it must not know requests, chunks or where pages are stored.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

import attrs


@attrs.frozen
class Windows:
    """`sizes` has one entry per group, in tokens: how far a token sees, itself included; 0 means all the way."""

    block_size: int
    sizes: tuple[int, ...] = (0,)

    num_groups: int = attrs.field(init=False, repr=False)
    """Groups of layers, each with a block table of its own."""
    forget: bool = attrs.field(init=False, repr=False)
    """Whether any group has a window."""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "num_groups", len(self.sizes))
        object.__setattr__(self, "forget", any(self.sizes))

    def first_block(self, group: int, num_tokens: int) -> int:
        """The first block that the token behind `num_tokens` sees; once they are processed, earlier ones are freed."""
        size = self.sizes[group]
        return max(0, num_tokens - size + 1) // self.block_size if size else 0

    def pages(self, blocks: range) -> range:
        """The pages of these blocks in all groups."""
        return range(blocks.start * self.num_groups, blocks.stop * self.num_groups)

    def pages_seen(self, num_tokens: int, blocks: range) -> Iterator[int]:
        """Those pages of these blocks that the token behind `num_tokens` sees, ascending."""
        first_blocks = [self.first_block(group, num_tokens) for group in range(self.num_groups)]
        for block in blocks:
            for group, first_block in enumerate(first_blocks):
                if block >= first_block:
                    yield block * self.num_groups + group

    def last_boundary(self, num_tokens: int, step: int, is_stored: Callable[[int, int], bool]) -> int:
        """The longest prefix of at most `num_tokens` tokens behind which all that a window sees is stored.

        Candidates are `num_tokens` itself and the multiples of `step` below it. Groups without a window are not
        looked at: the prefix is taken to be stored for them.

        Args:
            num_tokens: the longest prefix that is wanted.
            step: chunk size in tokens; a multiple or a divisor of the block size.
            is_stored: (page, prefix in tokens) -> whether the page is stored with all its tokens of that prefix.
        """
        end = num_tokens if self.forget else 0
        while end:
            missing = self._first_missing(end, is_stored)
            if missing is None:
                return end
            # Every longer prefix sees that block as well. Inside it, a shorter image may do.
            end = min(end, (missing + 1) * self.block_size) - 1
            end -= end % step
        return 0 if self.forget else num_tokens

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


def blocks_at(pages: Sequence[int], table: Sequence[int]) -> tuple[int, ...]:
    """The blocks of these pages, none of them behind the end of the flat table."""
    if len(pages) == 1:
        return (table[pages[0]],)
    if type(pages) is range and pages.start >= 0:
        blocks = table[pages.start : pages.stop]
        return tuple(blocks.tolist() if type(blocks) is array else blocks)  # an array's own way is the shorter one
    return tuple([table[page] for page in pages])


def interleave(tables: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """One flat table of the groups' tables.

    Raises:
        ValueError: the tables are of unequal length, so that an index would not name the same tokens in all of them.
    """
    if len(tables) == 1:
        return tuple(tables[0])
    if len(set(map(len, tables))) > 1:
        message = f"the block tables of {len(tables)} groups have {', '.join(map(str, map(len, tables)))} entries"
        raise ValueError(message)
    return tuple(block_id for row in zip(*tables, strict=True) for block_id in row)
