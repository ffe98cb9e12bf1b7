"""Mistakes of one about where tokens lie: in every function of `geometry.py` that decides something.

The audit computes the same by itself (`reader/layout.py`), so none of these mistakes hides itself.
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
    """A function that returns what `mistaken(original, *arguments)` does."""

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
    """A chunk is looked for in the block of the token before it."""

    def blocks_of(original: Any, geometry: Any, chunks: Any) -> Any:
        chunks = list(chunks)
        if geometry.chunk_size >= geometry.block_size:
            return original(geometry, chunks)
        return tuple(sorted({max(0, chunk * geometry.chunk_size - 1) // geometry.block_size for chunk in chunks}))

    return [off_by_one(Geometry, "blocks_of", blocks_of, touch)]


@mutant("SRC_BLOCK_OWNED", scene=LONG_CHUNKS)
def last_page_of_a_chunk_left_out(touch: Touch) -> Sequence[Patch]:
    """Of a chunk in several blocks the last one is left out."""

    def pages_of(original: Any, geometry: Any, chunks: Any) -> Any:
        num_pages = geometry.pages_per_chunk
        if geometry.chunks_share_blocks or num_pages < 2:
            return original(geometry, chunks)
        return [page for page in original(geometry, chunks) if page % num_pages != num_pages - 1]

    return [off_by_one(Geometry, "pages_of", pages_of, touch)]


@mutant("LOADABLE_AFTER_COMMIT", scene=HybridWorlds())
def pages_of_a_save_one_further(touch: Touch) -> Sequence[Patch]:
    """The slots of a saved chunk are taken to hold the page behind the one that each of them holds."""

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
    """A load is taken to end before its last chunk."""

    def chunks_of_load(original: Any, *arguments: Any) -> range:
        chunks = original(*arguments)
        return range(chunks.start, max(chunks.start, chunks.stop - 1))

    return [off_by_one(Geometry, "chunks_of_load", chunks_of_load, touch)]


@mutant("FAILED_LOAD_TAINT", scene=Walks())
def first_chunk_of_a_load_not_counted(touch: Touch) -> Sequence[Patch]:
    """A load is taken to begin behind its first chunk."""

    def chunks_of_load(original: Any, *arguments: Any) -> range:
        chunks = original(*arguments)
        return range(min(chunks.start + 1, chunks.stop), chunks.stop)

    return [off_by_one(Geometry, "chunks_of_load", chunks_of_load, touch)]


@mutant("LOAD_DST_EXCLUSIVE", scene=WITHOUT_TAILS)
def last_page_not_spanned(touch: Touch) -> Sequence[Patch]:
    """The pages of tokens are counted without the last one."""

    def pages_spanning(original: Any, *arguments: Any) -> range:
        pages = original(*arguments)
        return range(pages.start, max(pages.start, pages.stop - 1))

    return [off_by_one(Geometry, "pages_spanning", pages_spanning, touch)]


@mutant("SRC_BLOCK_OWNED", scene=SHARED_BLOCKS)
def first_block_not_spanned(touch: Touch) -> Sequence[Patch]:
    """The blocks of tokens that begin inside a block are counted from the next one on."""

    def blocks_spanning(original: Any, geometry: Any, first_token: int, num_tokens: int) -> range:
        return range(-(-first_token // geometry.block_size), original(geometry, first_token, num_tokens).stop)

    return [off_by_one(Geometry, "blocks_spanning", blocks_spanning, touch)]


@mutant("LOAD_DST_EXCLUSIVE", scene=WITHOUT_TAILS)
def begun_block_not_spanned(touch: Touch) -> Sequence[Patch]:
    """A block that the tokens fill in part is not counted among their blocks."""

    def blocks_spanning(_original: Any, geometry: Any, first_token: int, num_tokens: int) -> range:
        return range(first_token // geometry.block_size, (first_token + num_tokens) // geometry.block_size)

    return [off_by_one(Geometry, "blocks_spanning", blocks_spanning, touch)]


@mutant("LOAD_DST_EXCLUSIVE", scene=WITHOUT_TAILS)
def blocks_spanned_from_one_earlier(touch: Touch) -> Sequence[Patch]:
    """The blocks of tokens are counted from the block before the first one on."""

    def blocks_spanning(original: Any, *arguments: Any) -> range:
        blocks = original(*arguments)
        return range(max(0, blocks.start - 1), blocks.stop)

    return [off_by_one(Geometry, "blocks_spanning", blocks_spanning, touch)]


@mutant("LOADABLE_AFTER_COMMIT", scene=HybridWorlds())
def slots_of_a_chunk_one_page_further(touch: Touch) -> Sequence[Patch]:
    """A chunk's slots are taken to hold the page behind the one that each of them holds."""

    def slots_of(original: Any, *arguments: Any) -> Any:
        slots = original(*arguments)
        return slots if not slots or NO_SLOT in slots else slots[1:] + slots[:1]

    return [off_by_one(Geometry, "slots_of", slots_of, touch)]


@mutant("LOADABLE_AFTER_COMMIT", scene=BIG_POOL)
def one_earlier_chunk_left_out(touch: Touch) -> Sequence[Patch]:
    """A longer image of a block is not taken to hold the chunk right before its last one."""

    def earlier_chunks(original: Any, geometry: Any, chunks: Any, num_known: int) -> list[int]:
        chunks = list(chunks)
        earlier: list[int] = original(geometry, chunks, num_known)
        return [chunk for chunk in earlier if chunk + 1 not in chunks]

    return [off_by_one(Geometry, "earlier_chunks", earlier_chunks, touch)]


@mutant("LOADABLE_AFTER_COMMIT", scene=SHARED_BLOCKS)
def image_of_the_next_block(touch: Touch) -> Sequence[Patch]:
    """The longest image of a block is looked for at the first chunk of the next one."""

    def place_of(original: Any, geometry: Any, page: int, num_chunks: int) -> tuple[int, int]:
        chunk, place = original(geometry, page, num_chunks)
        return (min(chunk + 1, num_chunks - 1), place) if geometry.chunk_size < geometry.block_size else (chunk, place)

    return [off_by_one(Geometry, "place_of", place_of, touch)]


@mutant("LOADABLE_AFTER_COMMIT", scene=HybridWorlds())
def place_one_page_further(touch: Touch) -> Sequence[Patch]:
    """A page is looked for in the chunk's slots where the group's next page lies."""

    def place_of(original: Any, geometry: Any, page: int, num_chunks: int) -> tuple[int, int]:
        chunk, place = original(geometry, page, num_chunks)
        num_groups = len(geometry.window_sizes)
        if geometry.window_sizes[page % num_groups]:  # its next page may not be stored: then nothing is loaded
            return chunk, place
        return chunk, (place + num_groups) % geometry.pages_per_chunk

    return [off_by_one(Geometry, "place_of", place_of, touch)]


@mutant("WAITING_KEPT", scene=WITHOUT_TAILS, beside=["EVICTION_ORDER"])
def one_whole_chunk_too_few(touch: Touch) -> Sequence[Patch]:
    """Of some tokens the last whole chunk is not counted."""

    def num_chunks_in(original: Any, *arguments: Any) -> int:
        return max(0, original(*arguments) - 1)

    return [off_by_one(Geometry, "num_chunks_in", num_chunks_in, touch)]


@mutant("CHUNK_COMPLETE", scene=BIG_POOL)
def tail_from_one_chunk_earlier(touch: Touch) -> Sequence[Patch]:
    """A tail begins one chunk before the end of the last whole one."""
    return one_whole_chunk_too_few(touch)


@mutant("CHUNK_COMPLETE", scene=SHARED_BLOCKS, beside=["PIN_BALANCE"])
def one_chunk_too_many_taken_for_whole(touch: Touch) -> Sequence[Patch]:
    """A chunk of which only a part is there is counted as whole."""

    def num_chunks_in(original: Any, *arguments: Any) -> int:
        return original(*arguments) + 1

    return [off_by_one(Geometry, "num_chunks_in", num_chunks_in, touch)]


# --- windows, and tables of several groups ---------------------------------------------------------------------------


@mutant("GROUP_AGREEMENT", scene=HybridWorlds())
def window_one_token_longer(touch: Touch) -> Sequence[Patch]:
    """A token is taken to see one token more than its window has."""

    def first_block(_original: Any, windows: Any, group: int, num_tokens: int) -> int:
        size = windows.sizes[group]
        return max(0, num_tokens - size) // windows.block_size if size else 0

    return [off_by_one(Windows, "first_block", first_block, touch)]


@mutant("GROUP_AGREEMENT", scene=HybridWorlds())
def window_one_token_shorter(touch: Touch) -> Sequence[Patch]:
    """A token is taken to see one token less than its window has."""

    def first_block(_original: Any, windows: Any, group: int, num_tokens: int) -> int:
        size = windows.sizes[group]
        return max(0, num_tokens - size + 2) // windows.block_size if size else 0

    return [off_by_one(Windows, "first_block", first_block, touch)]


@mutant("GROUP_AGREEMENT", scene=HybridWorlds())
def boundary_one_step_too_early(touch: Touch) -> Sequence[Patch]:
    """Where a load has to end earlier, it ends one chunk earlier still."""

    def last_boundary(original: Any, windows: Any, num_tokens: int, step: int, is_stored: Any) -> int:
        end: int = original(windows, num_tokens, step, is_stored)
        return end if end == num_tokens else max(0, end - step)

    return [off_by_one(Windows, "last_boundary", last_boundary, touch)]


@mutant("GROUP_AGREEMENT", scene=HybridWorlds())
def boundary_one_step_too_late(touch: Touch) -> Sequence[Patch]:
    """Where a load has to end earlier, it ends one chunk too late."""

    def last_boundary(original: Any, windows: Any, num_tokens: int, step: int, is_stored: Any) -> int:
        end: int = original(windows, num_tokens, step, is_stored)
        return min(num_tokens, end + step)

    return [off_by_one(Windows, "last_boundary", last_boundary, touch)]


@mutant("GROUP_AGREEMENT", scene=HybridWorlds())
def begun_block_not_looked_at(touch: Touch) -> Sequence[Patch]:
    """Whether a load may end somewhere is decided without the block that it fills in part."""

    def first_missing(original: Any, windows: Any, end: int, is_stored: Any) -> Any:
        begun = end // windows.block_size
        return original(windows, end, lambda page, at: page // windows.num_groups == begun or is_stored(page, at))

    return [off_by_one(Windows, "_first_missing", first_missing, touch)]


@mutant("SRC_BLOCK_OWNED", scene=SHARED_BLOCKS)
def blocks_one_place_further(touch: Touch) -> Sequence[Patch]:
    """Blocks are looked up in the table one place behind their pages."""

    def blocks_at(original: Any, pages: Any, table: Any) -> tuple[int, ...]:
        return original([min(page + 1, len(table) - 1) for page in pages], table)

    return [off_by_one(saves, "blocks_at", blocks_at, touch)]


@mutant("TABLE_EQ", scene=HybridWorlds())
def last_blocks_not_interleaved(touch: Touch) -> Sequence[Patch]:
    """The flat table of all groups ends one block early."""

    def interleave(original: Any, tables: Any) -> tuple[int, ...]:
        return original([table[:-1] for table in tables])

    return [off_by_one(versions, "interleave", interleave, touch)]
