"""Where the CUDA engine puts bytes, shown on CPU tensors: all but streams, events and vLLM's batched copy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from copy_engines import DTYPES, KV_LAYOUTS, NUM_BLOCKS, Geometry, make_kv_memory, printed_seed
from torch.utils._python_dispatch import TorchDispatchMode

from kvledger.storage.kv import HostPool, describe_blocks, make_copy_engine
from kvledger.storage.kv.cuda import PendingCudaCopy
from kvledger.storage.kv.cuda_movers import BatchedMover, Mover, StagedMover
from kvledger.storage.kv.layout import BlockLayout


def copy_in_cpu_memory(
    sources: torch.Tensor, destinations: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool
) -> None:
    """What vLLM's `swap_blocks_batch` does and demands (`_custom_ops.py`, 0.32), in the least convenient order."""
    assert is_src_access_order_any in (True, False)
    for tensor in (sources, destinations, sizes):
        assert (tensor.dtype, tensor.device.type, tensor.ndim) == (torch.int64, "cpu", 1)
        assert tensor.is_contiguous()
    rows = list(zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True))
    for destination, source, size in reversed(rows):
        ctypes.memmove(destination, source, size)


def staged(layout: BlockLayout, pool: HostPool) -> Mover:
    """Through a buffer that holds two slots, so that a call takes several batches."""
    return StagedMover(layout, pool, staging_bytes=2 * pool.slot_bytes)


def batched(layout: BlockLayout, pool: HostPool) -> Mover:
    """Straight, with a stand-in for vLLM's function."""
    return BatchedMover(layout, pool.slot_bytes, copy_in_cpu_memory)


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
    engine.start_save(sources, slots)
    assert torch.equal(pool.buffer, twin_pool.buffer)
    mover.move(targets, slots, pool.buffer, writes_slots=False)
    engine.start_load(slots, targets)
    assert torch.equal(memory.bytes(), twin.bytes())


class BrokenEvent:
    """An event of a device that has failed: CUDA answers every question with the failure."""

    def query(self) -> bool:
        """Fail."""
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    synchronize = query


def test_a_copy_that_failed_on_the_device_is_done_and_says_so_when_it_is_waited_for() -> None:
    """Asking never raises, or the failure of one copy would surface where another is asked for."""
    given: Future[Any] = Future()
    given.set_result((BrokenEvent(), BrokenEvent()))
    pending = PendingCudaCopy(given, torch.device("cuda"), 1, 8)
    assert pending.done()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        pending.result()


def test_a_copy_that_no_stream_has_been_given_is_not_done_and_one_that_was_refused_is() -> None:
    """The thread that gives copies to streams may be late, or the driver may refuse."""
    given: Future[Any] = Future()
    pending = PendingCudaCopy(given, torch.device("cuda"), 1, 8)
    assert not pending.done()
    given.set_exception(RuntimeError("out of memory"))
    assert pending.done()
    pending.precede()
    with pytest.raises(RuntimeError, match="out of memory"):
        pending.result()


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do with bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        """Ask, and count."""
        name = function.overloadpacket.__name__
        self.num_copies += name in {"index_select", "index_copy_", "copy_"}
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("num_layers", [2, 80])
@pytest.mark.parametrize("writes_slots", [True, False])
def test_a_gathered_copy_takes_as_many_calls_however_many_layers_there_are(num_layers: int, writes_slots: bool) -> None:
    """Layers of one allocation, as vLLM allocates them: one gather, one scatter, one transfer."""
    together = torch.zeros(num_layers, 32, 4096, dtype=torch.uint8)
    layout = describe_blocks({f"layer.{i}": layer for i, layer in enumerate(together)}, num_blocks=32)
    pool = HostPool(32, layout.block_bytes, pin=False)
    mover = StagedMover(layout, pool)
    with Operations() as operations:
        mover.move(range(3, 19), range(16), pool.buffer, writes_slots=writes_slots)
    assert operations.num_copies == 3


@pytest.mark.parametrize("writes_slots", [True, False])
def test_no_transfer_crosses_from_one_page_locked_piece_into_the_next(writes_slots: bool) -> None:
    """Sixteen consecutive slots in pieces of five: transfers of 5, 5, 5 and 1."""
    layout = describe_blocks(
        {"layer": torch.zeros(32, 4096, dtype=torch.uint8)}, num_blocks=32, block_dims={"layer": 0}
    )
    pool = HostPool(32, layout.block_bytes, pin=False)
    pool.slots_a_piece = 5
    mover = StagedMover(layout, pool)
    with Operations() as operations:
        mover.move(range(3, 19), range(16), pool.buffer, writes_slots=writes_slots)
    assert operations.num_copies == 2 + 4
