"""Where the CUDA engine puts bytes, shown on CPU tensors: all but streams, events and the real driver."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from kvledger.storage.kv import HostPool, make_copy_engine
from kvledger.storage.kv.cuda_batch import BATCH_ENTRY_POINT, BatchCopy, BatchedMover, BatchUnavailable, _entry_point
from kvledger.storage.kv.cuda_engine import Mover, PendingCudaCopy
from kvledger.storage.kv.cuda_staging import StagedMover
from kvledger.storage.kv.layout import BlockLayout
from kvledger.storage.kv.testing import DTYPES, KV_LAYOUTS, make_kv_memory, printed_seed
from kvledger.storage.kv.testing.memory import NUM_BLOCKS, Geometry

STREAM = 0x5EED
ALL_ATTRIBUTES = ctypes.c_uint * 6


def copy_in_cpu_memory(  # noqa: PLR0917
    dsts: int, srcs: int, sizes: int, count: int, attrs: int, idxs: int, num_attrs: int, fail: int, stream: int
) -> int:
    """What `cuMemcpyBatchAsync` of CUDA 12.8 does, in the least convenient order; a copy of 13 bytes is an error."""
    pointers, lengths = ctypes.c_void_p * count, ctypes.c_size_t * count
    for i in reversed(range(count)):
        if lengths.from_address(sizes)[i] == 13:
            ctypes.c_size_t.from_address(fail).value = i
            return 700
        ctypes.memmove(pointers.from_address(dsts)[i], pointers.from_address(srcs)[i], lengths.from_address(sizes)[i])
    stream_order, no_hints = 1, [0] * 5
    asked = list(ALL_ATTRIBUTES.from_address(attrs)), num_attrs, ctypes.c_size_t.from_address(idxs).value, stream
    return 0 if asked == ([stream_order, *no_hints], 1, 0, STREAM) else 1


STAND_IN = BATCH_ENTRY_POINT(copy_in_cpu_memory)


def staged(layout: BlockLayout, pool: HostPool) -> Mover:
    """Through a buffer that holds two slots, so that a call takes several batches."""
    return StagedMover(layout, pool.slot_bytes, pool.num_slots, staging_bytes=2 * pool.slot_bytes)


def batched(layout: BlockLayout, pool: HostPool) -> Mover:
    """Straight, with the stand-in for the driver."""
    return BatchedMover(layout, pool.slot_bytes, BatchCopy(STAND_IN, STREAM))


@pytest.mark.parametrize("make_mover", [staged, batched])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("geometry", KV_LAYOUTS.values(), ids=KV_LAYOUTS.keys())
def test_a_mover_moves_the_bytes_that_the_cpu_engine_moves(
    geometry: Geometry, dtype: torch.dtype, make_mover: Callable[[BlockLayout, HostPool], Mover]
) -> None:
    """Saved into mixed slots, loaded into other blocks: every byte of both sides is the same, also those between."""
    generator = torch.Generator().manual_seed(printed_seed())
    memory = make_kv_memory(geometry, dtype, "cpu", generator)
    twin = memory.clone()
    sides = []
    for side in (memory, twin):
        layout = side.layout()
        sides.append((layout, HostPool(NUM_BLOCKS + 3, layout.block_bytes, pin=False)))
    (layout, pool), (twin_layout, twin_pool) = sides
    mover, engine = make_mover(layout, pool), make_copy_engine(twin_layout, twin_pool)
    sources, targets = (torch.randperm(NUM_BLOCKS, generator=generator)[:7].tolist() for _ in range(2))
    slots = [9, 2, 3, 4, 13, 0, 8]

    mover.move(sources, slots, pool.buffer, writes_slots=True)
    engine.save(sources, slots)
    assert torch.equal(pool.buffer, twin_pool.buffer)
    mover.move(targets, slots, pool.buffer, writes_slots=False)
    engine.load(slots, targets)
    assert torch.equal(memory.bytes(), twin.bytes())


def test_a_batch_that_the_driver_refuses_is_an_error_with_its_code_and_place() -> None:
    """The message names the code, the copy and the way to do without."""
    memory = torch.zeros(64, dtype=torch.uint8)
    starts, sizes = memory.data_ptr() + torch.tensor([0, 16, 32]), torch.tensor([8, 13, 8])
    with pytest.raises(RuntimeError, match=r"3 copies failed with CUDA error 700 at copy 1.*batched_from_bytes=None"):
        BatchCopy(STAND_IN, STREAM)(starts, starts, sizes)


def driver_that_answers(code: int, address: int) -> SimpleNamespace:
    """The one function that is used of `cuda.bindings.driver`, as CUDA 12.8 to 13 document it."""
    known = {(b"cuMemcpyBatchAsync", 12080, 0): (code, address, 0)}
    return SimpleNamespace(cuGetProcAddress=lambda *asked: known[asked])


def test_the_entry_point_is_asked_for_in_the_version_whose_signature_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address the driver gives is what is called."""
    address = ctypes.cast(STAND_IN, ctypes.c_void_p).value
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver_that_answers(0, address))
    memory = torch.arange(64, dtype=torch.uint8)
    BatchCopy(_entry_point(), STREAM)(
        memory.data_ptr() + torch.tensor([0, 8]), memory.data_ptr() + torch.tensor([32, 48]), torch.tensor([4, 8])
    )
    assert memory[:16].tolist() == [32, 33, 34, 35, 4, 5, 6, 7, *range(48, 56)]


@pytest.mark.parametrize(("code", "address"), [(1, 0), (0, 0)], ids=["older driver", "not on this platform"])
def test_a_driver_without_the_batched_copy_says_so(monkeypatch: pytest.MonkeyPatch, code: int, address: int) -> None:
    """Then the engine gathers."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver_that_answers(code, address))
    with pytest.raises(BatchUnavailable, match=r"no cuMemcpyBatchAsync of CUDA 12\.8"):
        _entry_point()


class BrokenEvent:
    """An event of a device that has failed: CUDA answers every question with the failure."""

    def query(self) -> bool:
        """Fail."""
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    synchronize = query


def test_a_copy_that_failed_on_the_device_is_done_and_says_so_when_it_is_waited_for() -> None:
    """Asking never raises, or the failure of one copy would surface where another is asked for."""
    pending = PendingCudaCopy((BrokenEvent(), BrokenEvent()), 1, 8)
    assert pending.is_done()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        pending.wait()
