"""What LMCache 0.5.6 hands to its workers lists blocks of each group; objects here have the fields that it says.

They are those of `lmcache/integration/vllm/lmcache_mp_metadata.py` and of `LoadStoreOp` in
`vllm_multi_process_adapter.py` beside it. With real LMCache the decoder runs in `tests/e2e/test_lmcache.py`, on a model
of one group.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvledger.adapters.recorded.payloads import Transferred
from kvledger.adapters.recorder import decoders

BLOCK_SIZE = 16
STORE, RETRIEVE = "STORE", "RETRIEVE"


def read(direction: str, block_ids: Any, start: int, end: int, skipped: int = 0) -> list[tuple[str, Transferred]]:
    """The copies of metadata for one request, in a class of LMCache's name."""
    op = SimpleNamespace(
        token_ids=list(range(end)), block_ids=block_ids, start=start, end=end, skip_first_n_tokens=skipped
    )
    metadata = type("LMCacheMPConnectorMetadata", (), {})()
    metadata.requests = [
        SimpleNamespace(request_id="a", direction=direction, op=op, cache_salt="", request_configs=None)
    ]
    metadata.need_flush_before_forward = False
    return list(decoders.copies(metadata, BLOCK_SIZE))


def test_each_group_is_a_copy_with_its_own_blocks() -> None:
    """Of one job; its first block is counted in the group's table."""
    assert read(STORE, [[20, 21], [30, 31]], 64, 96) == [
        ("a", Transferred("64-96", False, 0, 4, (20, 21), is_whole=True)),
        ("a", Transferred("64-96", False, 1, 4, (30, 31), is_whole=True)),
    ]


def test_blocks_of_more_tokens_begin_earlier_in_their_table() -> None:
    """A block of 32 tokens stands where two of 16 stand."""
    assert read(STORE, [[20, 21], [30]], 64, 96) == [
        ("a", Transferred("64-96", False, 0, 4, (20, 21), is_whole=True)),
        ("a", Transferred("64-96", False, 1, 2, (30,), is_whole=True)),
    ]


def test_a_group_that_is_never_stored_has_no_copy_and_keeps_its_number() -> None:
    """LMCache lists no blocks of it."""
    assert [copy.group for _, copy in read(STORE, [[], [30, 31]], 0, 32)] == [1]


@pytest.mark.parametrize(("direction", "num_left"), [(RETRIEVE, 1), (STORE, 0)])
def test_what_is_cached_locally_is_left_out_of_a_load_in_each_group(direction: str, num_left: int) -> None:
    """As many blocks of each group as the tokens take there; a store has none to leave out."""
    told = read(direction, [[20, 21, 22, 23], [30, 31]], 64, 128, skipped=32)
    assert [(copy.first_block, copy.block_ids) for _, copy in told] == [
        (4 + 2 * num_left, (20, 21, 22, 23)[2 * num_left :]),
        (2 + num_left, (30, 31)[num_left:]),
    ]
    assert {copy.is_load for _, copy in told} == {direction == RETRIEVE}


def test_one_group_may_come_as_a_plain_list() -> None:
    """As vLLM 0.32's own connector lists it, and serializers make of a list of one."""
    assert read(STORE, [20, 21], 32, 64) == read(STORE, [[20, 21]], 32, 64)
    assert read(STORE, [20, 21], 32, 64) == [("a", Transferred("32-64", False, 0, 2, (20, 21), is_whole=True))]


def test_a_request_without_blocks_has_no_copy() -> None:
    """Nor has one whose groups have none."""
    assert read(STORE, [], 0, 32) == read(STORE, [[], []], 0, 32) == []
