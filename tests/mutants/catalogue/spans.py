"""Mutants that are off by one about positions of tokens: one or more for each function of `geometry.py` that decides.

The audit computes the same positions with code of its own (`reader/layout.py`), so it sees each of these bugs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvledger.adapters.vllm import versions
from kvledger.lifecycle.decisions import saves
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.geometry import Geometry, Windows
from mutants.catalogue.parts import wrapped
from mutants.mutant import Patch, Touch, mutant
from mutants.scenes import HybridWorlds, Walks, Worlds

SHARED_BLOCKS = Walks(chunks_in_blocks=((4, 16), (8, 16)))
"""Several chunks end in each block."""
LONG_CHUNKS = Walks(chunks_in_blocks=((32, 16), (64, 16)))
"""Several blocks hold each chunk."""
WITHOUT_TAILS = Walks(options=(("save_tails", False),))
BIG_POOL = Worlds(connector=(("chunk_size", 4),), num_slots=400)
"""Several chunks end in each block, and none is evicted."""


def off_by_one(owner: Any, name: str, mistaken: Callable[..., Any], touch: Touch) -> Patch:
    """Patch that makes a function return what `mistaken(original, *arguments)` returns."""

    def around(original: Any, *arguments: Any, **named: Any) -> Any:
        right, wrong = original(*arguments, **named), mistaken(original, *arguments, **named)
        if isinstance(right, int | None | tuple):
            if wrong != right:
                touch()
        elif list(wrong) != list(right):
            touch()
        return wrong

    return wrapped(owner, name, around)


# --- chunks, blocks and pages ----------------------------------------------------------------------------------------


@mutant("SRC_BLOCK_OWNED", scene=SHARED_BLOCKS)
def block_before_the_chunk(touch: Touch) -> Sequence[Patch]:
    """A save reads a chunk from the block that holds the token before the chunk."""

    def blocks_of(original: Any, geometry: Any, chunks: Any) -> Any:
        chunks = list(chunks)
        if geometry.chunk_size >= geometry.block_size:
            return original(geometry, chunks)
        return tuple(sorted({max(0, chunk * geometry.chunk_size - 1) // geometry.block_size for chunk in chunks}))

    return [off_by_one(Geometry, "blocks_of", blocks_of, touch)]


@mutant("SRC_BLOCK_OWNED", scene=LONG_CHUNKS)
def last_page_of_a_chunk_left_out(touch: Touch) -> Sequence[Patch]:
    """A chunk of several blocks is copied without its last block."""

    def pages_of(original: Any, geometry: Any, chunks: Any) -> Any:
        num_pages = geometry.pages_per_chunk
        if geometry.chunks_share_blocks or num_pages < 2:
            return original(geometry, chunks)
        return [page for page in original(geometry, chunks) if page % num_pages != num_pages - 1]

    return [off_by_one(Geometry, "pages_of", pages_of, touch)]


@mutant("LOADABLE_AFTER_COMMIT", scene=HybridWorlds())
def pages_of_a_save_one_further(touch: Touch) -> Sequence[Patch]:
    """After a save, each slot counts as holding the page that follows the page copied into the slot."""

    def pages_for(original: Any, geometry: Any, chunks: Any, num_slots: int) -> list[int]:
        pages, sizes = list(original(geometry, chunks, num_slots)), geometry.window_sizes
        num_pages = geometry.pages_per_chunk
        for place in () if geometry.chunks_share_blocks else range(0, len(pages), num_pages):
            always_stored = [at for at in range(place, place + num_pages) if not sizes[pages[at] % len(sizes)]]
            behind = [pages[at] for at in (*always_stored[1:], always_stored[0])]
            for at, page in zip(always_stored, behind, strict=True):
                pages[at] = page
        return pages

    return [off_by_one(Geometry, "pages_for", pages_for, touch)]


@mutant("FAILED_LOAD_TAINT", scene=Walks())
def last_chunk_of_a_load_not_counted(touch: Touch) -> Sequence[Patch]:
    """The last chunk of a load does not count as part of the load."""

    def chunks_of_load(original: Any, *arguments: Any) -> range:
        chunks = original(*arguments)
        return range(chunks.start, max(chunks.start, chunks.stop - 1))

    return [off_by_one(Geometry, "chunks_of_load", chunks_of_load, touch)]


@mutant("FAILED_LOAD_TAINT", scene=Walks())
def first_chunk_of_a_load_not_counted(touch: Touch) -> Sequence[Patch]:
    """The first chunk of a load does not count as part of the load."""

    def chunks_of_load(original: Any, *arguments: Any) -> range:
        chunks = original(*arguments)
        return range(min(chunks.start + 1, chunks.stop), chunks.stop)

    return [off_by_one(Geometry, "chunks_of_load", chunks_of_load, touch)]


@mutant("LOAD_DST_EXCLUSIVE", scene=WITHOUT_TAILS)
def last_page_not_spanned(touch: Touch) -> Sequence[Patch]:
    """The last page of a range of tokens does not count as part of the range."""

    def pages_spanning(original: Any, *arguments: Any) -> range:
        pages = original(*arguments)
        return range(pages.start, max(pages.start, pages.stop - 1))

    return [off_by_one(Geometry, "pages_spanning", pages_spanning, touch)]


@mutant("SRC_BLOCK_OWNED", scene=SHARED_BLOCKS)
def first_block_not_spanned(touch: Touch) -> Sequence[Patch]:
    """The first block of a range of tokens does not count as part of the range if the range begins inside the block."""

    def blocks_spanning(original: Any, geometry: Any, first_token: int, num_tokens: int) -> range:
        return range(-(-first_token // geometry.block_size), original(geometry, first_token, num_tokens).stop)

    return [off_by_one(Geometry, "blocks_spanning", blocks_spanning, touch)]


@mutant("LOAD_DST_EXCLUSIVE", scene=WITHOUT_TAILS)
def begun_block_not_spanned(touch: Touch) -> Sequence[Patch]:
    """The last block of a range of tokens does not count as part of the range if the range ends inside the block."""

    def blocks_spanning(_original: Any, geometry: Any, first_token: int, num_tokens: int) -> range:
        return range(first_token // geometry.block_size, (first_token + num_tokens) // geometry.block_size)

    return [off_by_one(Geometry, "blocks_spanning", blocks_spanning, touch)]


@mutant("LOAD_DST_EXCLUSIVE", scene=WITHOUT_TAILS)
def blocks_spanned_from_one_earlier(touch: Touch) -> Sequence[Patch]:
    """The block before a range of tokens counts as part of the range."""

    def blocks_spanning(original: Any, *arguments: Any) -> range:
        blocks = original(*arguments)
        return range(max(0, blocks.start - 1), blocks.stop)

    return [off_by_one(Geometry, "blocks_spanning", blocks_spanning, touch)]


@mutant("LOADABLE_AFTER_COMMIT", scene=HybridWorlds())
def slots_of_a_chunk_one_page_further(touch: Touch) -> Sequence[Patch]:
    """Each page of a committed chunk counts as stored in the slot of the next page."""

    def slots_of(original: Any, *arguments: Any) -> Any:
        slots = original(*arguments)
        return slots if not slots or NO_SLOT in slots else slots[1:] + slots[:1]

    return [off_by_one(Geometry, "slots_of", slots_of, touch)]


@mutant("LOADABLE_AFTER_COMMIT", scene=BIG_POOL)
def one_earlier_chunk_left_out(touch: Touch) -> Sequence[Patch]:
    """If chunks share a block, the slot of a saved chunk does not count as holding the previous chunk of the block."""

    def earlier_chunks(original: Any, geometry: Any, chunks: Any, num_known: int) -> list[int]:
        chunks = list(chunks)
        earlier: list[int] = original(geometry, chunks, num_known)
        return [chunk for chunk in earlier if chunk + 1 not in chunks]

    return [off_by_one(Geometry, "earlier_chunks", earlier_chunks, touch)]


@mutant("LOADABLE_AFTER_COMMIT", scene=SHARED_BLOCKS)
def image_of_the_next_block(touch: Touch) -> Sequence[Patch]:
    """If several chunks share a block, a load fills the block from the slot of the next block's first chunk."""

    def place_of(original: Any, geometry: Any, page: int, num_chunks: int) -> tuple[int, int]:
        chunk, place = original(geometry, page, num_chunks)
        return (min(chunk + 1, num_chunks - 1), place) if geometry.chunk_size < geometry.block_size else (chunk, place)

    return [off_by_one(Geometry, "place_of", place_of, touch)]


@mutant("LOADABLE_AFTER_COMMIT", scene=HybridWorlds())
def place_one_page_further(touch: Touch) -> Sequence[Patch]:
    """A load reads each page from the slot of the next page of the same group."""

    def place_of(original: Any, geometry: Any, page: int, num_chunks: int) -> tuple[int, int]:
        chunk, place = original(geometry, page, num_chunks)
        num_groups = len(geometry.window_sizes)
        if geometry.window_sizes[page % num_groups]:  # its next page may not be stored: then nothing is loaded
            return chunk, place
        return chunk, (place + num_groups) % geometry.pages_per_chunk

    return [off_by_one(Geometry, "place_of", place_of, touch)]


@mutant("WAITING_KEPT", scene=WITHOUT_TAILS, beside=["EVICTION_ORDER"])
def one_whole_chunk_too_few(touch: Touch) -> Sequence[Patch]:
    """The number of whole chunks in a given number of tokens is one too low."""

    def num_chunks_in(original: Any, *arguments: Any) -> int:
        return max(0, original(*arguments) - 1)

    return [off_by_one(Geometry, "num_chunks_in", num_chunks_in, touch)]


@mutant("CHUNK_COMPLETE", scene=BIG_POOL)
def tail_from_one_chunk_earlier(touch: Touch) -> Sequence[Patch]:
    """A tail includes the last full chunk instead of beginning after it."""
    return one_whole_chunk_too_few(touch)


@mutant("CHUNK_COMPLETE", scene=SHARED_BLOCKS, beside=["PIN_BALANCE"])
def one_chunk_too_many_taken_for_whole(touch: Touch) -> Sequence[Patch]:
    """The number of whole chunks in a given number of tokens is one too high."""

    def num_chunks_in(original: Any, *arguments: Any) -> int:
        return original(*arguments) + 1

    return [off_by_one(Geometry, "num_chunks_in", num_chunks_in, touch)]


# --- windows, and tables of several groups ---------------------------------------------------------------------------


# The answer then also gives the window as the reason for its end, although the log shows every page (LONGEST_HIT).
@mutant("GROUP_AGREEMENT", scene=HybridWorlds(), beside=["LONGEST_HIT"])
def window_one_token_longer(touch: Touch) -> Sequence[Patch]:
    """A sliding window counts as one token longer than it is."""

    def first_block(_original: Any, windows: Any, group: int, num_tokens: int) -> int:
        size = windows.sizes[group]
        return max(0, num_tokens - size) // windows.block_size if size else 0

    return [off_by_one(Windows, "first_block", first_block, touch)]


@mutant("GROUP_AGREEMENT", scene=HybridWorlds())
def window_one_token_shorter(touch: Touch) -> Sequence[Patch]:
    """A sliding window counts as one token shorter than it is."""

    def first_block(_original: Any, windows: Any, group: int, num_tokens: int) -> int:
        size = windows.sizes[group]
        return max(0, num_tokens - size + 2) // windows.block_size if size else 0

    return [off_by_one(Windows, "first_block", first_block, touch)]


@mutant("GROUP_AGREEMENT", scene=HybridWorlds())
def boundary_one_step_too_early(touch: Touch) -> Sequence[Patch]:
    """If a sliding window makes a load shorter than the hit, the load is one chunk too short."""

    def last_boundary(original: Any, windows: Any, num_tokens: int, step: int, is_stored: Any) -> int:
        end: int = original(windows, num_tokens, step, is_stored)
        return end if end == num_tokens else max(0, end - step)

    return [off_by_one(Windows, "last_boundary", last_boundary, touch)]


@mutant("GROUP_AGREEMENT", scene=HybridWorlds())
def boundary_one_step_too_late(touch: Touch) -> Sequence[Patch]:
    """If a sliding window makes a load shorter than the hit, the load is one chunk too long."""

    def last_boundary(original: Any, windows: Any, num_tokens: int, step: int, is_stored: Any) -> int:
        end: int = original(windows, num_tokens, step, is_stored)
        return min(num_tokens, end + step)

    return [off_by_one(Windows, "last_boundary", last_boundary, touch)]


@mutant("GROUP_AGREEMENT", scene=HybridWorlds())
def begun_block_not_looked_at(touch: Touch) -> Sequence[Patch]:
    """The check whether a load may end at a token leaves out the block that the load fills in part."""

    def first_missing(original: Any, windows: Any, end: int, is_stored: Any) -> Any:
        begun = end // windows.block_size
        return original(windows, end, lambda page, at: page // windows.num_groups == begun or is_stored(page, at))

    return [off_by_one(Windows, "_first_missing", first_missing, touch)]


@mutant("SRC_BLOCK_OWNED", scene=SHARED_BLOCKS)
def blocks_one_place_further(touch: Touch) -> Sequence[Patch]:
    """A save reads each page from the block one place too far in the block table."""

    def blocks_at(original: Any, pages: Any, table: Any) -> tuple[int, ...]:
        return original([min(page + 1, len(table) - 1) for page in pages], table)

    return [off_by_one(saves, "blocks_at", blocks_at, touch)]


@mutant("TABLE_EQ", scene=HybridWorlds())
def last_blocks_not_interleaved(touch: Touch) -> Sequence[Patch]:
    """The block table that the connector records for all groups leaves out the last block of each group."""

    def interleave(original: Any, tables: Any) -> tuple[int, ...]:
        return original([table[:-1] for table in tables])

    return [off_by_one(versions, "interleave", interleave, touch)]
