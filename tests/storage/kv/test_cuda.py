"""The CUDA engines keep their contracts; runs only where there is a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from copy_engines import KV_LAYOUTS, NUM_BLOCKS, CopyEngineContract, make_kv_memory
from copy_engines.batched import find_batched_copy

from kvledger.storage.kv import (
    BatchedCopy,
    CopyEngine,
    HostPool,
    SharedFile,
    Sharing,
    describe_blocks,
    make_copy_engine,
)
from kvledger.storage.kv.cuda import BATCHED_FROM_BYTES, CudaCopyEngine
from kvledger.storage.kv.cuda_movers import BatchedMover, StagedMover
from kvledger.storage.kv.layout import BlockLayout

pytestmark = pytest.mark.usefixtures("cuda")

SOME_CYCLES = 50_000_000  # some 30 ms; a shorter wait would make the tests weaker, never wrong


@contextmanager
def busy_stream() -> Iterator[None]:
    """Give the current stream something to do first, so that what is started within is probably pending."""
    torch.cuda._sleep(SOME_CYCLES)
    yield


def batched_copy() -> BatchedCopy:
    """VLLM's, where it is to be had."""
    copy = find_batched_copy()
    if copy is None:
        pytest.skip("there is no vLLM with swap_blocks_batch")
    return copy


class TestCudaCopyEnginePinned(CopyEngineContract):
    """Everything the contract asks, both directions on one stream, from and to pinned memory."""

    device = "cuda"
    pin = True

    def held_back(self, engine: CopyEngine) -> Iterator[None]:
        """The copy waits for the stream that it was started from."""
        del engine
        return busy_stream()


class TestAsynchronousCudaCopyEngine(TestCudaCopyEnginePinned):
    """The same on two streams."""

    def make_engine(self, layout: BlockLayout, pool: HostPool) -> CopyEngine:
        """Gathers."""
        return CudaCopyEngine(layout, pool, is_async=True)


class TestBatchedCudaCopyEngine(TestCudaCopyEnginePinned):
    """The same from address to address, however short the runs."""

    def make_engine(self, layout: BlockLayout, pool: HostPool) -> CopyEngine:
        """Always vLLM's batched copy."""
        return CudaCopyEngine(layout, pool, is_async=True, batched_copy=batched_copy(), batched_from_bytes=0)


class TestCudaCopyEngineUnpinned(CopyEngineContract):
    """What kvledger chooses, without pinning."""

    device = "cuda"

    def make_engine(self, layout: BlockLayout, pool: HostPool) -> CopyEngine:
        """On two streams."""
        return make_copy_engine(layout, pool, is_async=True)


@pytest.mark.parametrize(
    ("page_bytes", "pin", "mover"),
    [
        (BATCHED_FROM_BYTES - 32, True, StagedMover),
        (BATCHED_FROM_BYTES, True, BatchedMover),
        (BATCHED_FROM_BYTES, False, StagedMover),
    ],
)
def test_long_runs_of_a_pinned_pool_go_from_address_to_address(page_bytes: int, pin: bool, mover: type) -> None:
    """Short ones are gathered, and so is all that CUDA could not copy without waiting."""
    layer = torch.zeros(4, page_bytes, dtype=torch.uint8, device="cuda")
    layout = describe_blocks({"layer": layer}, num_blocks=4)
    engine = CudaCopyEngine(layout, HostPool(2, layout.block_bytes, pin=pin), batched_copy=batched_copy())
    assert {type(each) for each in engine._movers.values()} == {mover}


@pytest.mark.parametrize("is_batched", [False, True], ids=["staged", "batched"])
def test_copies_wait_for_the_stream_they_were_started_from(is_batched: bool) -> None:
    """Each of two streams of the caller's writes late, and each save has what its own stream wrote."""
    layer = torch.zeros(2, 1 << 18, device="cuda")
    layout = describe_blocks({"layer": layer}, num_blocks=2, block_dims={"layer": 0})
    pool = HostPool(2, layout.block_bytes, pin=True)
    engine = CudaCopyEngine(layout, pool, is_async=True, batched_copy=batched_copy() if is_batched else None)
    torch.cuda.synchronize()
    pending = []
    for block_id in range(2):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(SOME_CYCLES)
            layer[block_id].fill_(block_id + 1.0)
            pending.append(engine.start_save([block_id], [block_id]))
    for block_id, copy in enumerate(pending):
        copy.result()
        assert bool((pool.buffer[block_id].view(torch.float32) == block_id + 1.0).all())
    engine.close()


def test_pending_copies_that_share_the_staging_memory_do_not_mix() -> None:
    """Four times the staging memory is on its way at once, in both directions."""
    layer = torch.randint(0, 256, (256, 1 << 20), dtype=torch.uint8, device="cuda")
    original = layer.clone()
    layout = describe_blocks({"layer": layer}, num_blocks=256, block_dims={"layer": 0})
    pool = HostPool(256, layout.block_bytes, pin=True)
    engine = CudaCopyEngine(layout, pool, is_async=True)
    slots = torch.randperm(256).tolist()
    saves = [engine.start_save(range(i, i + 32), slots[i : i + 32]) for i in range(0, 256, 32)]
    saves[-1].result()
    layer.zero_()
    loads = [engine.start_load(slots[i : i + 32], range(i, i + 32)) for i in range(0, 256, 32)]
    loads[-1].result()
    assert torch.equal(layer, original)
    engine.close()


def test_cuda_tensors_get_the_cuda_engine_and_a_pinned_pool() -> None:
    """Pinning registers the allocation itself, and closing gives it back.

    The test asks the driver, because torch 2.11's `Tensor.is_pinned` is False for registered memory.
    """
    layout = describe_blocks({"layer": torch.zeros(4, 8, device="cuda")}, num_blocks=4)
    pool = HostPool(2, layout.block_bytes, pin=True)
    assert isinstance(make_copy_engine(layout, pool), CudaCopyEngine)
    assert pool.is_pinned
    buffer = pool.buffer
    assert _is_page_locked(buffer)
    pool.close()
    assert not pool.is_pinned
    assert not _is_page_locked(buffer)


def _is_page_locked(memory: torch.Tensor) -> bool:
    """Whether CUDA knows the address as host memory.

    `cuPointerGetAttributes` succeeds for any other address and writes 0. After a failed call of the runtime torch would
    raise at its next kernel, and the sanitizer would report it.
    """
    memory_type, attribute = ctypes.c_uint(), ctypes.c_int(2)  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    answers = (ctypes.c_void_p * 1)(ctypes.addressof(memory_type))
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuPointerGetAttributes(1, ctypes.byref(attribute), answers, ctypes.c_uint64(memory.data_ptr()))
    assert code == 0, f"cuPointerGetAttributes failed with CUDA error {code}"
    return memory_type.value == 1  # CU_MEMORYTYPE_HOST


def test_a_save_waits_for_what_the_current_stream_was_given() -> None:
    """A long computation queued before the save is in the saved bytes."""
    layer = torch.zeros(64, 1 << 18, device="cuda")
    layout = describe_blocks({"layer": layer}, num_blocks=64)
    pool = HostPool(64, layout.block_bytes, pin=True)
    engine = make_copy_engine(layout, pool)
    busy = torch.rand(4096, 4096, device="cuda")
    for _ in range(30):
        busy = busy @ busy / 4096
    layer.fill_(1.0)
    engine.start_save(range(64), range(64)).result()
    assert bool((pool.buffer.view(torch.float32) == 1.0).all())
    layer.zero_()
    engine.start_load(range(64), range(64)).result()
    assert bool((layer == 1.0).all())


def test_more_than_the_staging_buffer_holds_is_copied_in_batches() -> None:
    """192 MiB in scattered slots survive the round trip."""
    layers = {f"layer.{i}": torch.randint(0, 256, (96, 1 << 20), dtype=torch.uint8, device="cuda") for i in range(2)}
    originals = {name: layer.clone() for name, layer in layers.items()}
    layout = describe_blocks(layers, num_blocks=96)
    pool = HostPool(96, layout.block_bytes, pin=True)
    engine = make_copy_engine(layout, pool)
    slots = torch.randperm(96).tolist()
    engine.start_save(range(96), slots).result()
    for layer in layers.values():
        layer.zero_()
    engine.start_load(slots, range(96)).result()
    for name, layer in layers.items():
        assert torch.equal(layer, originals[name])


@pytest.mark.parametrize("is_async", [False, True])
def test_two_mappings_of_one_pool_are_both_pinned_and_each_writes_its_part(is_async: bool) -> None:
    """What two ranks have that share it, here in one process: each page comes back through either."""
    told: list[SharedFile] = []

    def from_first(file: SharedFile | None) -> SharedFile:
        told.extend([file] if file is not None else [])
        return told[0]

    memory = make_kv_memory(KV_LAYOUTS["mla"], torch.bfloat16, "cuda", torch.Generator().manual_seed(0))
    layout, right, numbers = memory.layout(), memory.bytes().clone(), list(range(NUM_BLOCKS))
    ranks = [Sharing(rank, 2, from_first) for rank in range(2)]
    pools = [HostPool(NUM_BLOCKS, layout.block_bytes, pin=True, sharing=rank) for rank in ranks]
    assert all(pool.is_pinned for pool in pools)
    engines = [make_copy_engine(layout, pool, is_async=is_async) for pool in pools]
    for rank, engine in zip(ranks, engines, strict=True):
        own = [number for number in numbers if rank.writes(number)]
        engine.start_save(own, own).result()
    for engine in engines:
        for number in numbers:
            for page in memory.pages(number):
                page.fill_(0)
        engine.start_load(numbers, numbers).result()
        assert torch.equal(memory.bytes(), right)
    for engine, pool in zip(engines, pools, strict=True):
        engine.close()
        pool.close()
