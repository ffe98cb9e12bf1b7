"""What sliding windows keep, need and allow, against a plain enumeration of what attention reads."""

from __future__ import annotations

import random

import pytest

from kvledger.lifecycle.geometry import Windows, interleave

BLOCK = 16


def read_by_next_token(window: int, num_tokens: int) -> set[int]:
    """The blocks that the token behind `num_tokens` reads, position by position."""
    first = max(0, num_tokens - window + 1) if window else 0
    return {position // BLOCK for position in range(first, num_tokens)}


@pytest.mark.parametrize("window", [0, 2, 15, 16, 17, 48, 64])
def test_the_first_block_is_the_first_that_attention_reads(window: int) -> None:
    """For every prefix, the blocks from the first one on are exactly those that the next token reads."""
    windows = Windows(BLOCK, (window,))
    for num_tokens in range(200):
        blocks = range(windows.first_block(0, num_tokens), -(-num_tokens // BLOCK))
        assert set(blocks) == read_by_next_token(window, num_tokens)


def test_without_windows_a_page_is_a_block() -> None:
    """One group of full attention sees every page, and may stop anywhere."""
    windows = Windows(BLOCK)
    assert not windows.has_any
    assert windows.pages(range(2, 5)) == range(2, 5)
    assert list(windows.pages_seen(80, range(2, 5))) == [2, 3, 4]
    assert windows.last_boundary(77, 32, lambda _page, _end: False) == 77


def test_pages_of_groups_lie_side_by_side() -> None:
    """Page `block * num_groups + group`; of a group with a window only the last blocks are seen."""
    windows = Windows(BLOCK, (32, 0))
    assert windows.num_groups == 2
    assert windows.pages(range(1, 3)) == range(2, 6)
    # 80 tokens: the window's 31 tokens before the next one begin in block 3, full attention sees all.
    assert list(windows.pages_seen(80, range(5))) == [1, 3, 5, 6, 7, 8, 9]


def test_a_boundary_is_the_last_one_whose_windows_are_stored() -> None:
    """Checked against trying every candidate, for random windows and random gaps."""
    for seed in range(400):
        rng = random.Random(seed)
        step = rng.choice([8, 16, 32])
        windows = Windows(BLOCK, tuple(rng.choice([0, 8, 16, 20, 48]) for _ in range(rng.randrange(1, 4))))
        limit = rng.randrange(1, 200)
        gaps = {rng.randrange(200 // BLOCK * windows.num_groups) for _ in range(rng.randrange(5))}
        cut_short = {rng.randrange(200 // BLOCK * windows.num_groups) for _ in range(rng.randrange(3))}

        def is_stored(page: int, end: int, gaps=gaps, cut_short=cut_short, windows=windows) -> bool:  # noqa: ANN001
            # An image that was cut short holds the first half of its block only.
            num_valid = min(BLOCK, end - page // windows.num_groups * BLOCK)
            return page not in gaps and (page not in cut_short or num_valid <= BLOCK // 2)

        candidates = [limit, *range(limit - 1 - (limit - 1) % step, 0, -step)]
        expected = 0
        for end in candidates:
            needed = [
                block * windows.num_groups + group
                for group, window in enumerate(windows.sizes)
                if window
                for block in read_by_next_token(window, end)
            ]
            if all(is_stored(page, end) for page in needed):
                expected = end
                break
        assert windows.last_boundary(limit, step, is_stored) == expected, f"seed {seed}"


def test_tables_are_interleaved_block_by_block() -> None:
    """Null blocks keep their place, and one group stays as it is."""
    assert interleave(([1, 2, 3], [0, 0, 7])) == (1, 0, 2, 0, 3, 7)
    assert interleave(([4, 5],)) == (4, 5)
    assert interleave(([], [])) == ()


def test_tables_of_unequal_length_are_refused() -> None:
    """An index must name the same tokens in every group."""
    with pytest.raises(ValueError, match="of 2 groups must have the same length, but have 3, 2 entries"):
        interleave(([1, 2, 3], [4, 5]))
