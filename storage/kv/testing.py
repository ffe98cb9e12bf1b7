"""Tests that every copy engine must pass, to be inherited.

    class TestMyEngine(CopyEngineContract):
        device = "cuda"

        def make_engine(self, layout, pool):
            return MyEngine(layout, pool)

Each KV layout is a tensor view on a larger allocation full of noise; torch's own indexing of that view is the oracle,
so that a wrong stride and a byte written next to a page both show. Needs pytest.
"""
# Tests that live in the package: they assert, take booleans from pytest and state expected numbers.
# ruff: noqa: S101, FBT001, PLR2004

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence

import attrs
import pytest
import torch

from kvledger.storage.kv.engine import CopyEngine, make_copy_engine
from kvledger.storage.kv.errors import (
    BlockOutOfRange,
    DuplicateDestination,
    EngineClosed,
    PoolClosed,
    PoolMismatch,
    SlotOutOfRange,
    StorageError,
    UnequalLengths,
)
from kvledger.storage.kv.layout import BlockLayout, describe_blocks
from kvledger.storage.kv.pool import HostPool

__all__ = ["DTYPES", "KV_LAYOUTS", "CopyEngineContract", "KVMemory", "make_kv_memory", "printed_seed"]

NUM_BLOCKS = 11
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.float8_e4m3fn)


@attrs.frozen
class Geometry:
    """Layer shapes and strides in elements within one allocation; `kernel_blocks` of them on `block_dim` are a page."""

    num_elements: int
    layers: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], int]]
    block_dim: int
    kernel_blocks: int = 1


def _dense(shape: tuple[int, ...], block_dim: int, order: tuple[int, ...] | None = None, **more: int) -> Geometry:
    """Two layers, one after the other, each dense with its dimensions in `order` of memory, outermost first."""
    strides, size = [0] * len(shape), 1
    for axis in reversed(order or tuple(range(len(shape)))):
        strides[axis], size = size, size * shape[axis]
    gap = 5  # An odd gap, so that the second layer is not aligned to anything.
    layers = {f"layer.{i}": (shape, tuple(strides), 3 + i * (size + gap)) for i in range(2)}
    return Geometry(2 * (size + gap) + 3, layers, block_dim, **more)


def _packed(page: int, num_layers: int, padding: int) -> Geometry:
    """All layers' pages of a block side by side, the block padded at its end."""
    block = num_layers * page + padding
    shape, strides = (NUM_BLOCKS, 4, page // 4), (block, page // 4, 1)
    return Geometry(NUM_BLOCKS * block, {f"layer.{i}": (shape, strides, i * page) for i in range(num_layers)}, 0)


KV_LAYOUTS: Mapping[str, Geometry] = {
    "k_and_v_side_by_side": _dense((NUM_BLOCKS, 2, 4, 2 * 8), 0),
    "k_and_v_apart_nhd": _dense((2, NUM_BLOCKS, 4, 3, 8), 1),
    "k_and_v_apart_hnd": _dense((2, NUM_BLOCKS, 4, 3, 8), 1, (0, 1, 3, 2, 4)),
    "hnd_view_of_one_tensor": _dense((NUM_BLOCKS, 2, 4, 3, 8), 0, (0, 1, 3, 2, 4)),
    "heads_outside_blocks": _dense((NUM_BLOCKS, 3, 4, 16), 0, (1, 0, 2, 3)),
    "mla": _dense((NUM_BLOCKS, 4, 18), 0),
    "odd_page": _dense((NUM_BLOCKS, 3, 7), 0),
    "packed_blocks": _packed(32, 3, 0),
    "packed_blocks_with_padding": _packed(32, 3, 16),
    "kernel_blocks_smaller_than_pages": _dense((2, NUM_BLOCKS * 2, 4, 8), 1, kernel_blocks=2),
    "large_pages": _dense((NUM_BLOCKS, 16, 8, 1024), 0),
    "layers_of_different_size": Geometry(
        NUM_BLOCKS * 96,
        {"small": ((NUM_BLOCKS, 32), (32, 1), 0), "large": ((NUM_BLOCKS, 64), (64, 1), NUM_BLOCKS * 32)},
        0,
    ),
}


@attrs.frozen
class KVMemory:
    """KV tensors over one allocation, with what a test needs to know about them."""

    allocation: torch.Tensor
    kv_caches: Mapping[str, torch.Tensor]
    geometry: Geometry

    def layout(self) -> BlockLayout:
        """The layout under test."""
        dims = dict.fromkeys(self.kv_caches, self.geometry.block_dim)
        return describe_blocks(self.kv_caches, num_blocks=NUM_BLOCKS, block_dims=dims)

    def pages(self, block_id: int) -> list[torch.Tensor]:
        """Views of the block's pages by torch's own indexing."""
        size = self.geometry.kernel_blocks
        return [t.narrow(self.geometry.block_dim, block_id * size, size) for t in self.kv_caches.values()]

    def scramble(self, generator: torch.Generator) -> None:
        """Fill the allocation with noise."""
        noise = torch.randint(0, 256, (self.allocation.nbytes,), dtype=torch.uint8, generator=generator)
        self.allocation.view(torch.uint8).copy_(noise)

    def bytes(self) -> torch.Tensor:
        """A copy of every byte of the allocation, also those that no page owns."""
        return self.allocation.view(torch.uint8).cpu().clone()

    def clone(self) -> KVMemory:
        """The same tensors over a copy of the allocation."""
        return _over(self.allocation.clone(), self.geometry)


def _over(allocation: torch.Tensor, geometry: Geometry) -> KVMemory:
    caches = {name: allocation.as_strided(*layer) for name, layer in geometry.layers.items()}
    return KVMemory(allocation, caches, geometry)


def make_kv_memory(geometry: Geometry, dtype: torch.dtype, device: str, generator: torch.Generator) -> KVMemory:
    """KV tensors of that geometry and type, full of noise (NaNs and all)."""
    memory = _over(torch.empty(geometry.num_elements, dtype=dtype, device=device), geometry)
    memory.scramble(generator)
    return memory


def printed_seed() -> int:
    """A fresh seed, printed so that pytest shows it on failure; `KVLEDGER_TEST_SEED` sets it to repeat one."""
    seed = int(os.environ.get("KVLEDGER_TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"KVLEDGER_TEST_SEED={seed}")  # noqa: T201
    return seed


class CopyEngineContract:
    """Inherit, set `device`, and override `make_engine` where the engine is not the one kvledger would choose."""

    device = "cpu"
    pin = False

    def make_engine(self, layout: BlockLayout, pool: HostPool) -> CopyEngine:
        """The engine under test."""
        return make_copy_engine(layout, pool)

    def _arranged(
        self, geometry: Geometry, dtype: torch.dtype
    ) -> tuple[KVMemory, HostPool, CopyEngine, torch.Generator]:
        generator = torch.Generator().manual_seed(printed_seed())
        memory = make_kv_memory(geometry, dtype, self.device, generator)
        layout = memory.layout()
        pool = HostPool(NUM_BLOCKS + 3, layout.block_bytes, pin=self.pin)
        return memory, pool, self.make_engine(layout, pool), generator

    @pytest.mark.parametrize("slots_are_consecutive", [True, False])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("geometry", KV_LAYOUTS.values(), ids=KV_LAYOUTS.keys())
    def test_saved_blocks_load_into_other_blocks_and_touch_nothing_else(
        self, geometry: Geometry, dtype: torch.dtype, slots_are_consecutive: bool
    ) -> None:
        """After the memory is scrambled, exactly the loaded pages differ from the noise, and they are as saved."""
        memory, pool, engine, generator = self._arranged(geometry, dtype)
        sources, targets = (torch.randperm(NUM_BLOCKS, generator=generator)[:6].tolist() for _ in range(2))
        slots = (
            list(range(2, 8))
            if slots_are_consecutive
            else torch.randperm(pool.num_slots, generator=generator)[:6].tolist()
        )
        before = memory.bytes()
        saved = memory.clone()
        result = engine.save(sources, slots)
        assert (result.num_pages, result.num_bytes) == (6, 6 * pool.slot_bytes)
        assert torch.equal(memory.bytes(), before), "save wrote into the KV tensors"

        memory.scramble(generator)
        expected = memory.clone()
        for source, target in zip(sources, targets, strict=True):
            for to_page, from_page in zip(expected.pages(target), saved.pages(source), strict=True):
                to_page.view(torch.uint8).copy_(from_page.view(torch.uint8))
        engine.load(slots, targets)
        assert torch.equal(memory.bytes(), expected.bytes())

    @pytest.mark.parametrize("geometry", KV_LAYOUTS.values(), ids=KV_LAYOUTS.keys())
    def test_a_slot_holds_layer_after_layer_and_segment_after_segment(self, geometry: Geometry) -> None:
        """The slot's byte order is what the layout says, and slots that were not named keep their bytes."""
        memory, pool, engine, _ = self._arranged(geometry, torch.bfloat16)
        pool.buffer.fill_(0xA5)
        engine.save([4, 9], [7, 1])
        raw, start = memory.bytes(), memory.layout().layers[0].storage.data_ptr()
        assert start == memory.allocation.data_ptr()
        for block_id, slot in ((4, 7), (9, 1)):
            runs = [
                raw[s.offset_bytes + block_id * s.block_stride_bytes :][: s.num_bytes]
                for layer in memory.layout().layers
                for s in layer.segments
            ]
            assert torch.equal(pool.buffer[slot], torch.cat(runs))
        untouched = [slot for slot in range(pool.num_slots) if slot not in (1, 7)]
        assert bool((pool.buffer[untouched] == 0xA5).all())

    @pytest.mark.parametrize(
        ("block_ids", "slots", "refusal"),
        [
            ([0, NUM_BLOCKS], [0, 1], BlockOutOfRange),
            ([0, -1], [0, 1], BlockOutOfRange),
            ([0, 1], [0, NUM_BLOCKS + 3], SlotOutOfRange),
            ([0, 1], [-1, 0], SlotOutOfRange),
            ([0, 1], [0], UnequalLengths),
            ([0], [0, 1], UnequalLengths),
            ([2, 2], [3, 3], DuplicateDestination),
        ],
    )
    def test_what_cannot_be_copied_is_refused_before_any_byte_moves(
        self, block_ids: Sequence[int], slots: Sequence[int], refusal: type[StorageError]
    ) -> None:
        """Neither side changes when a call is refused."""
        memory, pool, engine, _ = self._arranged(KV_LAYOUTS["mla"], torch.float32)
        pool.buffer.fill_(7)
        before = memory.bytes()
        calls: tuple[Callable[[], object], ...] = (
            lambda: engine.save(block_ids, slots),
            lambda: engine.load(slots, block_ids),
        )
        for call in calls:
            with pytest.raises(refusal):
                call()
        assert torch.equal(memory.bytes(), before)
        assert bool((pool.buffer == 7).all())

    def test_one_source_may_fill_several_destinations(self) -> None:
        """A block saved into two slots, and a slot loaded into two blocks, arrive twice."""
        memory, pool, engine, _ = self._arranged(KV_LAYOUTS["mla"], torch.float32)
        engine.save([5, 5], [0, 9])
        assert torch.equal(pool.buffer[0], pool.buffer[9])
        engine.load([0, 0], [1, 2])
        for block_id in (1, 2):
            for page, source in zip(memory.pages(block_id), memory.pages(5), strict=True):
                assert torch.equal(page.view(torch.uint8), source.view(torch.uint8))

    def test_copying_nothing_is_no_error(self) -> None:
        """Empty lists move zero pages."""
        _, _, engine, _ = self._arranged(KV_LAYOUTS["mla"], torch.float32)
        assert engine.save([], []).num_bytes == 0
        assert engine.load([], []).num_pages == 0

    def test_a_closed_engine_and_a_closed_pool_refuse(self) -> None:
        """Closing twice is harmless; copying afterwards is an error that says so."""
        _, pool, engine, _ = self._arranged(KV_LAYOUTS["mla"], torch.float32)
        pool.close()
        with pytest.raises(PoolClosed):
            engine.save([0], [0])
        engine.close()
        engine.close()
        with pytest.raises((EngineClosed, PoolClosed)):
            engine.load([0], [0])

    def test_a_pool_cut_for_another_layout_is_refused(self) -> None:
        """Slots must be exactly one block."""
        memory, pool, _, _ = self._arranged(KV_LAYOUTS["mla"], torch.float32)
        with pytest.raises(PoolMismatch, match=str(pool.slot_bytes + 8)):
            self.make_engine(memory.layout(), HostPool(2, pool.slot_bytes + 8, pin=False))
