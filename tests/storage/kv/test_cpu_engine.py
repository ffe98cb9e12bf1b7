"""The CPU engine keeps the contract, also where batches are cut and tensors lie apart."""

from __future__ import annotations

import weakref

import pytest
import torch

from kvledger.storage.kv import HostPool, LayerPages, describe_blocks, make_copy_engine
from kvledger.storage.kv.cpu_engine import CpuCopyEngine
from kvledger.storage.kv.engine import consecutive_runs
from kvledger.storage.kv.errors import EngineClosed, LayoutUnsupported
from kvledger.storage.kv.layout import BlockLayout
from kvledger.storage.kv.testing import CopyEngineContract, printed_seed


class TestCpuCopyEngine(CopyEngineContract):
    """Everything the contract asks, on CPU tensors."""


def test_cpu_tensors_get_the_cpu_engine() -> None:
    """The engine is chosen by where the tensors lie."""
    layout = describe_blocks({"layer": torch.zeros(4, 8)}, num_blocks=4)
    assert isinstance(make_copy_engine(layout, HostPool(2, layout.block_bytes, pin=False)), CpuCopyEngine)


def test_tensors_on_a_device_without_an_engine_are_refused_with_the_way_out() -> None:
    """The message names the contract that a new engine has to pass."""
    elsewhere = LayerPages("layer", torch.empty(32, dtype=torch.uint8, device="meta"), (), 4)
    pool = HostPool(1, 1, pin=False)
    with pytest.raises(LayoutUnsupported, match="CopyEngineContract"):
        make_copy_engine(BlockLayout((elsewhere,)), pool)


@pytest.mark.parametrize("page_bytes", [(64 << 10,) * 3, (64 << 10, 32 << 10, 64 << 10)], ids=["equal", "unequal"])
@pytest.mark.parametrize("one_allocation", [True, False])
def test_batches_larger_than_staging_and_mixed_slot_runs_arrive_whole(
    page_bytes: tuple[int, ...], one_allocation: bool
) -> None:
    """More than the staging buffer holds, some slots in long runs and some alone, each page where it belongs."""
    num_blocks = 96
    generator = torch.Generator().manual_seed(printed_seed())
    noise = torch.randint(0, 256, (num_blocks * sum(page_bytes),), dtype=torch.uint8, generator=generator)
    layers = [part.view(num_blocks, -1) for part in torch.split(noise, [num_blocks * size for size in page_bytes])]
    if not one_allocation:
        layers = [layer.clone() for layer in layers]
    originals = torch.cat(layers, dim=1)
    layout = describe_blocks({f"layer.{i}": layer for i, layer in enumerate(layers)}, num_blocks=num_blocks)
    pool = HostPool(200, layout.block_bytes, pin=False)
    engine = make_copy_engine(layout, pool)
    block_ids = torch.randperm(num_blocks, generator=generator).tolist()
    slots = [*range(40, 60), *range(61, 181, 2), *range(16)]

    engine.save(block_ids, slots)
    for block_id, slot in zip(block_ids, slots, strict=True):
        assert torch.equal(pool.buffer[slot], originals[block_id])
    for layer in layers:
        layer.zero_()
    engine.load(slots, block_ids)
    assert torch.equal(torch.cat(layers, dim=1), originals)


def test_layers_that_touch_in_one_block_and_not_in_the_next_stay_apart() -> None:
    """Neighbouring runs are joined only where they neighbour each other in every block."""
    raw = torch.arange(64, dtype=torch.uint8)
    layers = {"a": raw.as_strided((2, 8), (40, 1), 0), "b": raw.as_strided((2, 8), (16, 1), 8)}
    layout = describe_blocks(layers, num_blocks=2)
    pool = HostPool(2, layout.block_bytes, pin=False)
    make_copy_engine(layout, pool).save([0, 1], [0, 1])
    assert pool.buffer.tolist() == [list(range(16)), [*range(40, 48), *range(24, 32)]]


def test_bytes_at_odd_addresses_are_copied() -> None:
    """Where nothing is aligned the engine falls back to single bytes."""
    raw = torch.arange(200, dtype=torch.uint8)
    layer = raw.as_strided((9, 7), (13, 1), 3)
    layout = describe_blocks({"layer": layer}, num_blocks=9)
    pool = HostPool(4, layout.block_bytes, pin=False)
    make_copy_engine(layout, pool).save([8, 0], [1, 3])
    assert pool.buffer[1].tolist() == layer[8].tolist()
    assert pool.buffer[3].tolist() == layer[0].tolist()


def test_aliasing_layers_are_copied_once() -> None:
    """Two names for the same bytes take one place in the slot."""
    shared = torch.arange(32, dtype=torch.float32).view(4, 8)
    layout = describe_blocks(
        {"a": shared, "b": shared.view(4, 2, 4), "c": shared.clone()}, num_blocks=4, block_dims={"b": 0}
    )
    pool = HostPool(1, layout.block_bytes, pin=False)
    engine = make_copy_engine(layout, pool)
    assert engine.save([2], [0]).num_bytes == 2 * 8 * 4
    shared.zero_()
    engine.load([0], [2])
    assert shared[2].tolist() == list(range(16, 24))
    assert shared[1].tolist() == [0] * 8


def test_the_engine_keeps_the_tensors_it_copies_alive_until_it_is_closed() -> None:
    """Its row tables own no memory, so the engine itself must hold the storage."""
    layout = describe_blocks({"layer": torch.full((4, 8), 3, dtype=torch.uint8)}, num_blocks=4)
    pool = HostPool(1, layout.block_bytes, pin=False)
    engine = make_copy_engine(layout, pool)
    storage = weakref.ref(layout.layers[0].storage)
    del layout
    assert storage() is not None
    engine.save([1], [0])
    assert pool.buffer[0].tolist() == [3] * 8
    engine.close()
    assert storage() is None
    with pytest.raises(EngineClosed):
        engine.save([1], [0])


def test_consecutive_slots_are_grouped() -> None:
    """Runs are index ranges, and an empty list has none."""
    assert consecutive_runs([3, 4, 5, 9, 11, 12]) == [(0, 3), (3, 4), (4, 6)]
    assert consecutive_runs([]) == []
