"""The audit's arithmetic and that of what decides, written apart, agree on where tokens lie."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from kvledger.lifecycle.geometry import Geometry
from kvledger.lifecycle.reader.layout import Layout


class Both(NamedTuple):
    """One configuration, for both."""

    layout: Layout
    geometry: Geometry


@st.composite
def both(draw: st.DrawFn) -> Both:
    """Sizes of which one divides the other, and windows of any length."""
    smaller, factor = draw(st.sampled_from([1, 2, 5, 16])), draw(st.integers(1, 6))
    sizes = draw(st.permutations([smaller, smaller * factor]))
    windows = draw(st.lists(st.one_of(st.just(0), st.integers(1, 100)), min_size=1, max_size=4).map(tuple))
    return Both(Layout(*sizes, windows), Geometry(*sizes, windows))


def some_chunks(max_chunk: int = 40) -> st.SearchStrategy[list[int]]:
    """Ascending chunks."""
    return st.lists(st.integers(0, max_chunk), min_size=1, max_size=8, unique=True).map(sorted)


@given(of=both(), first=st.integers(0, 500), count=st.integers(1, 200))
def test_tokens_lie_in_the_same_blocks_and_pages(of: Both, first: int, count: int) -> None:
    """Of a load, a tail, or what a step computes."""
    pages = of.layout.pages_of(range(first, first + count))
    assert pages == of.geometry.pages_spanning(first, count)
    assert pages == of.geometry.windows.pages(of.geometry.blocks_spanning(first, count))


@given(of=both(), chunks=some_chunks(), max_pages=st.integers(0, 60))
def test_chunks_lie_in_the_same_pages(of: Both, chunks: list[int], max_pages: int) -> None:
    """And no more of them are listed than are asked for, however many chunks a log names."""
    pages = list(of.geometry.pages_of(chunks))
    assert list(of.layout.pages_of_chunks(chunks, max_pages)) == pages[:max_pages]
    assert list(of.geometry.pages_for(chunks, max_pages))[:max_pages] == pages[:max_pages]
    assert [page // of.layout.num_groups for page in pages][:: of.layout.num_groups] == list(
        of.geometry.blocks_of(chunks)
    )


@given(of=both(), chunk=st.integers(0, 40))
def test_a_chunk_has_the_same_pages_and_slots(of: Both, chunk: int) -> None:
    """The place of a page among the slots of a chunk is its place among the chunk's pages."""
    pages = of.layout.pages_of_chunk(chunk)
    assert len(pages) == of.layout.num_pages_of_chunk
    assert of.geometry.pages_per_chunk == len(pages)
    slot_of_page = {page: page + 1000 for page in pages}
    assert of.geometry.slots_of(chunk, slot_of_page) == tuple(slot_of_page.values())


@given(of=both(), num_tokens=st.integers(1, 300), data=st.data())
def test_the_longest_image_of_a_page_is_of_the_same_chunk(of: Both, num_tokens: int, data: st.DataObject) -> None:
    """Of what is stored of a prefix: the chunk that holds the last of its tokens in the page."""
    num_chunks = -(-num_tokens // of.layout.chunk_size)
    page = data.draw(st.sampled_from(of.layout.pages_of(range(num_chunks * of.layout.chunk_size))))
    last_token = min(num_chunks * of.layout.chunk_size, of.layout.tokens_of_page(page).stop) - 1
    (chunk,) = of.layout.chunks_of(range(last_token, last_token + 1))
    assert of.geometry.place_of(page, num_chunks) == (chunk, page - of.layout.pages_of_chunk(chunk).start)


@given(of=both(), chunks=some_chunks(), num_known=st.integers(0, 45))
def test_a_longer_image_replaces_the_same_chunks(of: Both, chunks: list[int], num_known: int) -> None:
    """Those that end earlier in the same blocks."""
    assert of.layout.chunks_replaced_by(chunks, num_known) == of.geometry.earlier_chunks(chunks, num_known)


@given(of=both(), first=st.integers(0, 300), count=st.integers(1, 300), num_known=st.integers(0, 40))
def test_a_load_needs_the_same_chunks(of: Both, first: int, count: int, num_known: int) -> None:
    """Also where it ends behind the last chunk whose key is known."""
    chunks = of.layout.chunks_of_load(range(first, first + count), num_known)
    assert list(chunks) == list(of.geometry.chunks_of_load(first, count, num_known))


@given(of=both(), num_tokens=st.integers(0, 300), num_blocks=st.integers(1, 40))
def test_windows_see_the_same_pages(of: Both, num_tokens: int, num_blocks: int) -> None:
    """Of the blocks up to any one, also before and behind the token that sees."""
    pages = of.geometry.windows.pages(range(num_blocks))
    seen = [page for page in pages if of.layout.is_seen(page, num_tokens)]
    assert seen == list(of.geometry.windows.pages_seen(num_tokens, range(num_blocks)))
    for group in range(of.layout.num_groups):
        first_block = of.geometry.windows.first_block(group, num_tokens)
        assert of.layout.is_seen(first_block * of.layout.num_groups + group, num_tokens)
        assert not first_block or not of.layout.is_seen((first_block - 1) * of.layout.num_groups + group, num_tokens)


@given(of=both(), num_tokens=st.integers(0, 300), data=st.data())
def test_a_load_may_end_at_the_same_token(of: Both, num_tokens: int, data: st.DataObject) -> None:
    """Whatever is stored, and however many of a page's tokens are."""
    pages = of.layout.pages_of(range(num_tokens + 1))
    stored = data.draw(
        st.dictionaries(st.sampled_from(pages), st.integers(0, of.layout.block_size), max_size=8), label="tokens stored"
    )

    def is_stored(page: int, end_token: int) -> bool:
        of_page = of.layout.tokens_of_page(page)
        return stored.get(page, of.layout.block_size) >= min(end_token, of_page.stop) - of_page.start

    expected = of.geometry.windows.last_boundary(num_tokens, of.layout.chunk_size, is_stored)
    found = of.layout.longest_seen(num_tokens, is_stored)
    assert found == (expected if of.layout.has_windows else num_tokens)


@given(of=both(), num_tokens=st.integers(0, 500))
def test_the_same_chunks_are_whole(of: Both, num_tokens: int) -> None:
    """A chunk is whole where its last token is among them."""
    num_chunks = of.geometry.num_chunks_in(num_tokens)
    assert of.layout.tokens_of_chunk(num_chunks).start <= num_tokens < of.layout.tokens_of_chunk(num_chunks).stop
