"""A digest is of a page's bytes and their order, wherever and in whatever layout they lie."""

from __future__ import annotations

import pytest
import torch
from copy_engines import DTYPES, KV_LAYOUTS, KVMemory, make_kv_memory, printed_seed

from kvledger.storage.kv import HostPool, PageDigests, make_copy_engine

LAYOUTS = sorted(KV_LAYOUTS)


def digested(layout: str, dtype: torch.dtype = torch.uint8) -> tuple[KVMemory, HostPool, PageDigests]:
    """Noise in that layout, blocks 0 to 3 of it in slots 3 to 0, and who digests both."""
    memory = make_kv_memory(KV_LAYOUTS[layout], dtype, "cpu", torch.Generator().manual_seed(printed_seed()))
    pool = HostPool(4, memory.layout().block_bytes, pin=False)
    make_copy_engine(memory.layout(), pool).start_save([0, 1, 2, 3], [3, 2, 1, 0])
    return memory, pool, PageDigests(memory.layout(), pool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_and_the_slot_it_was_saved_to_have_one_digest(layout: str, dtype: torch.dtype) -> None:
    """And other blocks have others."""
    _, _, digests = digested(layout, dtype)
    of_blocks = digests.of_blocks([0, 1, 2, 3]).tolist()
    assert of_blocks == digests.of_slots([3, 2, 1, 0]).tolist()
    assert len(set(of_blocks)) == 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_byte_counts(layout: str) -> None:
    """One bit of any byte of a slot changes its digest, and that of no other."""
    _, pool, digests = digested(layout)
    before = digests.of_slots([0, 1]).tolist()
    for byte in range(0, pool.slot_bytes, max(1, pool.slot_bytes // 50)):
        pool.buffer[0, byte] ^= 1
        changed, other = digests.of_slots([0, 1]).tolist()
        pool.buffer[0, byte] ^= 1
        assert changed != before[0]
        assert other == before[1]


@pytest.mark.parametrize("num_bytes", [1, 2, 4, 8, 16])
def test_the_order_of_bytes_counts(num_bytes: int) -> None:
    """Pieces of any size that change places make another digest."""
    _, pool, digests = digested(LAYOUTS[0])
    before = digests.of_slots([0]).item()
    row = pool.buffer[0]
    first, second = row[:num_bytes].clone(), row[num_bytes : 2 * num_bytes].clone()
    if torch.equal(first, second):
        second ^= 1
        row[num_bytes : 2 * num_bytes] = second
        before = digests.of_slots([0]).item()
    row[:num_bytes], row[num_bytes : 2 * num_bytes] = second, first
    assert digests.of_slots([0]).item() != before


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_words_that_differ_in_one_bit_may_not_change_places(bit: int) -> None:
    """Also not in the highest, where products of odd numbers differ in nothing but that bit."""
    _, pool, digests = digested(LAYOUTS[0])
    words = pool.buffer[0, :16].view(torch.int64)
    words[0], words[1] = 5, 5 ^ (1 << bit if bit < 63 else -(1 << 63))
    before = digests.of_slots([0]).item()
    words[0], words[1] = words[1].item(), words[0].item()
    assert digests.of_slots([0]).item() != before


def test_many_blocks_are_digested_in_pieces() -> None:
    """In their order; none are none."""
    _, _, digests = digested(LAYOUTS[0])
    one = digests.of_blocks([0, 1, 2]).tolist()
    assert digests.of_blocks([0, 1, 2] * 100).tolist() == one * 100
    assert digests.of_blocks([]).tolist() == []


def test_a_pool_must_be_there_to_digest_its_slots() -> None:
    """It says so."""
    memory, _, _ = digested(LAYOUTS[0])
    with pytest.raises(ValueError, match="pass a pool to PageDigests"):
        PageDigests(memory.layout()).of_slots([0])
