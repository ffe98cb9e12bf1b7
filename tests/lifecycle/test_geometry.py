"""Where chunks lie on blocks, for every combination in which one size divides the other."""

from __future__ import annotations

import itertools
from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvledger.lifecycle.geometry import Geometry, blocks_at


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Any sizes that fit one another."""
    small, factor = draw(st.integers(1, 32)), draw(st.integers(1, 16))
    sizes = draw(st.permutations([small, small * factor]))
    windows = draw(st.sampled_from([(0,), (0,), (0, 48), (32, 0, 0)]))
    return Geometry(block_size=sizes[0], chunk_size=sizes[1], window_sizes=windows)


def tokens_of_chunk(geometry: Geometry, chunk: int) -> range:
    """The tokens of one chunk."""
    return range(chunk * geometry.chunk_size, (chunk + 1) * geometry.chunk_size)


def test_a_chunk_larger_than_a_block_is_several_pages() -> None:
    """The seed's sizes: 256 on 16."""
    assert Geometry(16, 256).blocks_of((0,)) == tuple(range(16))
    assert Geometry(16, 256).blocks_of((2,)) == tuple(range(32, 48))


def test_chunks_that_share_a_block_share_its_page() -> None:
    """The seed's other sizes: 8 on 16."""
    assert Geometry(16, 8).blocks_of((0, 1, 2)) == (0, 1)
    assert Geometry(16, 8).earlier_chunks((1,), num_known=2) == [0]
    assert Geometry(16, 8).earlier_chunks((2,), num_known=3) == []


@given(geometry=geometries(), chunks=st.lists(st.integers(0, 200), min_size=1, max_size=8, unique=True).map(sorted))
def test_the_blocks_of_chunks_are_those_that_hold_their_tokens(geometry: Geometry, chunks: list[int]) -> None:
    """Ascending, each once."""
    tokens = [token for chunk in chunks for token in tokens_of_chunk(geometry, chunk)]
    assert geometry.blocks_of(chunks) == tuple(sorted({token // geometry.block_size for token in tokens}))


@given(geometry=geometries(), chunk=st.integers(0, 500))
def test_the_chunks_before_in_a_block_lie_wholly_in_the_block_where_the_chunk_ends(
    geometry: Geometry, chunk: int
) -> None:
    """An image with the chunk in it contains exactly them as well."""
    last_block = (tokens_of_chunk(geometry, chunk)[-1]) // geometry.block_size
    expected = [
        earlier
        for earlier in range(max(0, chunk - 20), chunk)
        if all(token // geometry.block_size == last_block for token in tokens_of_chunk(geometry, earlier))
    ]
    if geometry.chunk_size < geometry.block_size:
        assert geometry.earlier_chunks((chunk,), num_known=chunk + 1) == expected
    else:
        assert geometry.earlier_chunks((chunk,), num_known=chunk + 1) == []


@given(geometry=geometries(), first=st.integers(0, 5000), count=st.integers(1, 500))
def test_the_blocks_spanning_tokens_are_those_that_hold_one(geometry: Geometry, first: int, count: int) -> None:
    """No block too many, none too few."""
    assert list(geometry.blocks_spanning(first, count)) == sorted(
        {token // geometry.block_size for token in range(first, first + count)}
    )


@given(geometry=geometries(), num_tokens=st.integers(0, 10_000))
def test_only_whole_chunks_count(geometry: Geometry, num_tokens: int) -> None:
    """The part-filled last chunk is none."""
    num_chunks = geometry.num_chunks_in(num_tokens)
    assert num_chunks * geometry.chunk_size <= num_tokens < (num_chunks + 1) * geometry.chunk_size


@given(geometry=geometries(), num_chunks=st.integers(1, 40), data=st.data())
def test_the_place_of_a_page_is_the_longest_image_of_it(
    geometry: Geometry, num_chunks: int, data: st.DataObject
) -> None:
    """The last chunk that has the page among its pages, and where among them."""
    page = data.draw(st.sampled_from(geometry.pages_of(range(num_chunks))))
    chunk, place = geometry.place_of(page, num_chunks)
    holding = [chunk for chunk in range(num_chunks) if page in geometry.pages_of((chunk,))]
    assert chunk == max(holding)
    assert geometry.pages_of((chunk,))[place] == page


@given(geometry=geometries(), chunk=st.integers(0, 50))
def test_a_chunks_slots_are_those_of_its_pages(geometry: Geometry, chunk: int) -> None:
    """In token order."""
    slot_of_page = {page: 1000 + page for page in geometry.pages_of((chunk,))}
    assert geometry.slots_of(chunk, slot_of_page) == tuple(slot_of_page.values())


@given(geometry=geometries(), chunks=st.lists(st.integers(0, 40), max_size=6))
def test_the_pages_of_chunks_are_those_of_each(geometry: Geometry, chunks: list[int]) -> None:
    """In the order of the chunks, which a recorded copy may name in any order; shared pages ascending, each once."""
    pages = [page for chunk in chunks for page in geometry.pages_of((chunk,))]
    assert list(geometry.pages_of(chunks)) == (sorted(set(pages)) if geometry.chunks_share_blocks else pages)
    assert all(len(geometry.pages_of((chunk,))) == geometry.pages_per_chunk for chunk in chunks)


@given(geometry=geometries(), num_tokens=st.integers(0, 10_000))
def test_a_chunk_is_touched_by_its_first_token(geometry: Geometry, num_tokens: int) -> None:
    """So the part-filled last chunk counts."""
    assert geometry.num_chunks_touched(num_tokens) == len({token // geometry.chunk_size for token in range(num_tokens)})


@given(geometry=geometries(), num_chunks=st.integers(1, 20), data=st.data())
def test_the_slots_of_pages_are_those_of_the_longest_images(
    geometry: Geometry, num_chunks: int, data: st.DataObject
) -> None:
    """Page by page, wherever they begin."""
    slots_by_chunk = [range(100 * chunk, 100 * chunk + geometry.pages_per_chunk) for chunk in range(num_chunks)]
    num_pages = len(geometry.pages_of(range(num_chunks)))
    first, end = sorted(data.draw(st.tuples(st.integers(0, num_pages), st.integers(0, num_pages))))
    places = [geometry.place_of(page, num_chunks) for page in range(first, end)]
    expected = tuple(slots_by_chunk[chunk][place] for chunk, place in places)
    slots = tuple(itertools.chain.from_iterable(slots_by_chunk))
    assert geometry.slots_of_pages(range(first, end), slots) == expected


@given(pages=st.sets(st.integers(0, 60)).map(sorted))
def test_blocks_are_looked_up_by_their_pages(pages: list[int]) -> None:
    """In tables of either kind, with and without gaps."""
    table = range(100, 161)
    expected = tuple(table[page] for page in pages)
    assert blocks_at(pages, tuple(table)) == blocks_at(pages, array("I", table)) == expected
