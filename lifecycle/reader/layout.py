"""Which chunks, blocks and pages hold which tokens, and which pages a window sees.

`geometry.py` answers the same questions for the code that decides. This module does not import it, so an error in
`geometry.py` cannot hide itself. The layout follows from four facts of the log format:

- Tokens of a request are numbered from 0. Block `b` holds `block_size` tokens, from token `b * block_size` on.
- Chunk `c` holds `chunk_size` tokens, from token `c * chunk_size` on. One of the two sizes divides the other.
- A request's table has one entry, a page, for each block and group. Group `g` of block `b` is page
  `b * num_groups + g`.
- In a group with a window of `w` tokens, a token sees its own position and the `w - 1` positions before it. If `w` is
  0, it sees all positions up to its own.

The numbers come from a log and may be wrong. No function here takes longer for a larger number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs


@attrs.frozen
class Layout:
    """Where the tokens of a request are. Sizes are in tokens; a span of tokens is a `range` of token numbers."""

    block_size: int
    chunk_size: int
    windows: tuple[int, ...]
    """Window of each group: number of positions that a token sees; 0: all positions."""
    num_groups: int = attrs.field(init=False, repr=False)
    has_windows: bool = attrs.field(init=False, repr=False)
    """Whether at least one group has a window."""
    chunk_shares_block: bool = attrs.field(init=False, repr=False)
    """Whether a block holds several chunks. If so, the saved pages of a chunk also hold earlier chunks of the block."""
    num_pages_of_chunk: int = attrs.field(init=False, repr=False)
    """Number of pages that hold tokens of one chunk."""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "num_groups", len(self.windows))
        object.__setattr__(self, "has_windows", max(self.windows) > 0)
        object.__setattr__(self, "chunk_shares_block", self.chunk_size < self.block_size)
        object.__setattr__(self, "num_pages_of_chunk", len(self.pages_of_chunk(0)))

    def tokens_of_chunk(self, chunk: int) -> range:
        """Return the tokens of a chunk."""
        return range(chunk * self.chunk_size, chunk * self.chunk_size + self.chunk_size)

    def tokens_of_page(self, page: int) -> range:
        """Return the tokens of a page's block."""
        first_token = page // self.num_groups * self.block_size
        return range(first_token, first_token + self.block_size)

    def chunks_of(self, tokens: range) -> range:
        """Return the chunks that hold at least one of these tokens."""
        if not tokens:
            return range(0)
        return range(tokens[0] // self.chunk_size, tokens[-1] // self.chunk_size + 1)

    def pages_of(self, tokens: range) -> range:
        """Return the pages, in all groups, that hold at least one of these tokens."""
        if not tokens:
            return range(0)
        first_block, last_block = tokens[0] // self.block_size, tokens[-1] // self.block_size
        return range(first_block * self.num_groups, last_block * self.num_groups + self.num_groups)

    def pages_of_chunk(self, chunk: int) -> range:
        """Return the pages that hold tokens of the chunk, in the order of the chunk's slots."""
        return self.pages_of(self.tokens_of_chunk(chunk))

    def pages_of_chunks(self, chunks: Sequence[int], max_pages: int) -> Sequence[int]:
        """Return the pages of these chunks, in the order of the chunks and without repetitions; at most `max_pages`.

        The limit is for logs that name far more chunks than there are slots.
        """
        if not chunks:
            return ()
        if tuple(chunks) == tuple(range(chunks[0], chunks[0] + len(chunks))):  # one span of tokens, as nearly always
            pages_of_all = self.pages_of(range(chunks[0] * self.chunk_size, (chunks[-1] + 1) * self.chunk_size))
            return pages_of_all if len(pages_of_all) <= max_pages else pages_of_all[:max_pages]
        pages: dict[int, None] = {}
        for chunk in chunks:
            if len(pages) >= max_pages:
                break
            pages |= dict.fromkeys(self.pages_of_chunk(chunk)[: max_pages - len(pages)])
        return list(pages)

    def chunks_of_load(self, tokens: range, num_known: int) -> range:
        """Return the chunks that hold tokens of a load: chunks with known keys, and at most one chunk after them.

        The chunk after the known ones is the chunk of a tail. `num_known` is the number of chunks of the request whose
        keys are known.
        """
        chunks = self.chunks_of(tokens)
        first_chunk = max(chunks.start, 0)
        return range(first_chunk, min(chunks.stop, max(num_known, first_chunk) + 1))

    def chunks_replaced_by(self, chunks: Iterable[int], num_known: int) -> list[int]:
        """Return the earlier chunks in the blocks of these chunks. A save of these chunks copies the earlier ones, too.

        The result is in ascending order. It leaves out chunks from `num_known` on, whose keys are not known.
        """
        if not self.chunk_shares_block:
            return []
        last_chunk_in: dict[int, int] = {}
        for chunk in chunks:
            first_token = chunk * self.chunk_size
            first_token_of_block = first_token - first_token % self.block_size
            last_chunk_in[first_token_of_block] = max(last_chunk_in.get(first_token_of_block, chunk), chunk)
        before = {
            chunk
            for first_token, last_chunk in last_chunk_in.items()
            for chunk in range(first_token // self.chunk_size, min(last_chunk, num_known))
        }
        return sorted(before - set(chunks))

    def is_seen(self, page: int, num_tokens: int) -> bool:
        """Whether the token with the number `num_tokens`, or a later token, sees a position of the page."""
        window = self.windows[page % self.num_groups]
        return not window or self.tokens_of_page(page)[-1] > num_tokens - window

    def longest_seen(self, num_tokens: int, is_stored: Callable[[int, int], bool]) -> int:
        """Return the length of the longest prefix after which a load can end.

        All pages that the windows of the token after the prefix see must be stored. Groups without a window are not
        checked. The result is `num_tokens`, or the end of a chunk before it.

        Args:
            num_tokens: the longest prefix to consider, in tokens.
            is_stored: (page, tokens) → whether the page is stored with its part of the first `tokens` tokens.
        """
        while num_tokens > 0:
            missing = self._first_missing(num_tokens, is_stored)
            if missing is None:
                return num_tokens
            # If the load ended earlier, but after the missing page, the window would begin earlier and see the page.
            # If the load ends inside the page, less of the page is needed.
            last_token = min(num_tokens, missing.stop) - 1
            num_tokens = last_token - last_token % self.chunk_size
        return 0

    def _first_missing(self, num_tokens: int, is_stored: Callable[[int, int], bool]) -> range | None:
        """Return the tokens of the first page that a window sees and that is not stored; None if there is none.

        The windows are those of the token with the number `num_tokens`. Only pages with earlier tokens count.
        """
        missing: list[range] = []
        for group, window in enumerate(self.windows):
            if window:
                first_seen = max(num_tokens - window + 1, 0)
                pages = self.pages_of(range(min(first_seen, num_tokens - 1), num_tokens))[group :: self.num_groups]
                seen = (page for page in pages if self.is_seen(page, num_tokens))
                page = next((page for page in seen if not is_stored(page, num_tokens)), None)
                if page is not None:
                    missing.append(self.tokens_of_page(page))
        return min(missing, key=lambda tokens: tokens.start, default=None)
