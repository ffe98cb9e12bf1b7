"""The host pool: its figures, its one allocation and its end."""

from __future__ import annotations

import mmap

import pytest
import torch

from kvledger.storage.kv import HostPool
from kvledger.storage.kv.errors import PoolClosed, PoolTooSmall


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 64), (-1, 64), (4, 0)])
def test_a_pool_without_slots_or_bytes_is_refused(num_slots: int, slot_bytes: int) -> None:
    """There is no empty pool."""
    with pytest.raises(PoolTooSmall, match=f"a slot is {slot_bytes} bytes .* raise host_bytes"):
        HostPool(num_slots, slot_bytes, pin=False)


def test_more_memory_than_the_machine_has_is_refused_with_figures() -> None:
    """An allocation error of torch becomes one that names the budget."""
    with pytest.raises(PoolTooSmall, match="lower host_bytes"):
        HostPool(1 << 30, 1 << 30, pin=False)


def test_the_pool_is_one_allocation_of_whole_slots() -> None:
    """uint8, contiguous, from a page on, with less than a page around it."""
    pool = HostPool(6, 48, pin=False)
    assert pool.buffer.shape == (6, 48)
    assert pool.buffer.dtype == torch.uint8
    assert pool.buffer.is_contiguous()
    assert pool.buffer.data_ptr() % mmap.PAGESIZE == 0
    assert pool.buffer.untyped_storage().nbytes() == 6 * 48 + mmap.PAGESIZE
    assert not pool.is_pinned


def test_pinning_without_cuda_yields_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for pinned memory on a machine without CUDA is no error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pool = HostPool(2, 8, pin=True)
    assert not pool.is_pinned
    assert pool.buffer.numel() == 16


def test_a_closed_pool_says_so() -> None:
    """Closing twice is harmless, using the buffer afterwards is not possible."""
    pool = HostPool(2, 8, pin=False)
    pool.close()
    pool.close()
    with pytest.raises(PoolClosed, match="create a new HostPool"):
        _ = pool.buffer
