"""What every `CopyEngine` must do."""
# Tests that live in the package: they assert, take booleans from pytest and state expected numbers.
# ruff: noqa: S101, FBT001, PLR2004

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from kvledger.storage.kv.layout import BlockLayout
from kvledger.storage.kv.pool import HostPool
from kvledger.storage.kv.testing.memory import (
    DTYPES,
    KV_LAYOUTS,
    NUM_BLOCKS,
    Geometry,
    KVMemory,
    make_kv_memory,
    printed_seed,
)

__all__ = ["REFUSED", "CopyEngineContract"]

REFUSED: tuple[tuple[list[int], list[int], type[StorageError]], ...] = (
    ([0, NUM_BLOCKS], [0, 1], BlockOutOfRange),
    ([0, -1], [0, 1], BlockOutOfRange),
    ([0, 1], [0, NUM_BLOCKS + 3], SlotOutOfRange),
    ([0, 1], [-1, 0], SlotOutOfRange),
    ([0, 1], [0], UnequalLengths),
    ([0], [0, 1], UnequalLengths),
    ([2, 2], [3, 3], DuplicateDestination),
)
"""Block ids and slots that no copy in either direction accepts, and the refusal."""


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
        REFUSED,
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
