"""What every `CopyEngine` must do."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from copy_engines.memory import (
    DTYPES,
    KV_LAYOUTS,
    NUM_BLOCKS,
    Geometry,
    KVMemory,
    make_kv_memory,
    printed_seed,
)
from kvledger.storage.kv import BlockLayout, CopyEngine, HostPool, make_copy_engine
from kvledger.storage.kv.errors import CopyRefused, EngineClosed, PoolClosed, PoolMismatch

_REFUSED = (
    ([0, NUM_BLOCKS], [0, 1], "outside"),
    ([0, -1], [0, 1], "outside"),
    ([0, 1], [0, NUM_BLOCKS + 3], "outside"),
    ([0, 1], [-1, 0], "outside"),
    ([0, 1], [0], "cannot be paired"),
    ([0], [0, 1], "cannot be paired"),
    ([2, 2], [3, 3], "more than once"),
)
"""Block ids and slots that no copy in either direction accepts, and the reason."""


class CopyEngineContract:
    """Inherit, set `device`, and override `make_engine` where the engine is not the one kvledger would choose.

    Override `held_back` where copies can be kept from beginning: then the tests are sure to meet pending ones.
    """

    device = "cpu"
    pin = False

    def make_engine(self, layout: BlockLayout, pool: HostPool) -> CopyEngine:
        """The engine under test."""
        return make_copy_engine(layout, pool)

    def held_back(self, engine: CopyEngine) -> AbstractContextManager[object]:
        """Within this context what `engine` starts does not begin, if the engine offers a way."""
        del engine
        return nullcontext()

    def _arranged(
        self, geometry: Geometry, dtype: torch.dtype = torch.float32
    ) -> tuple[KVMemory, HostPool, CopyEngine, torch.Generator]:
        generator = torch.Generator().manual_seed(printed_seed())
        memory = make_kv_memory(geometry, dtype, self.device, generator)
        layout = memory.layout()
        pool = HostPool(NUM_BLOCKS + 3, layout.block_bytes, pin=self.pin)
        pool.buffer.fill_(0xA5)
        return memory, pool, self.make_engine(layout, pool), generator

    @pytest.mark.parametrize("geometry", KV_LAYOUTS.values(), ids=KV_LAYOUTS.keys())
    def test_a_slot_holds_layer_after_layer_and_segment_after_segment(self, geometry: Geometry) -> None:
        """The slot's byte order is what the layout says, and slots that were not named keep their bytes."""
        memory, pool, engine, _ = self._arranged(geometry, torch.bfloat16)
        pool.buffer.fill_(0xA5)
        engine.start_save([4, 9], [7, 1]).result()
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

    def test_one_source_may_fill_several_destinations(self) -> None:
        """A block saved into two slots, and a slot loaded into two blocks, arrive twice."""
        memory, pool, engine, _ = self._arranged(KV_LAYOUTS["mla"])
        engine.start_save([5, 5], [0, 9]).result()
        assert torch.equal(pool.buffer[0], pool.buffer[9])
        engine.start_load([0, 0], [1, 2]).result()
        for block_id in (1, 2):
            for page, source in zip(memory.pages(block_id), memory.pages(5), strict=True):
                assert torch.equal(page.view(torch.uint8), source.view(torch.uint8))

    def test_copying_nothing_is_no_error(self) -> None:
        """Empty lists move zero pages."""
        _, _, engine, _ = self._arranged(KV_LAYOUTS["mla"])
        assert engine.start_save([], []).result().num_bytes == 0
        assert engine.start_load([], []).result().num_pages == 0

    def test_a_closed_engine_and_a_closed_pool_refuse(self) -> None:
        """Closing twice is harmless; copying afterwards is an error that says so."""
        _, pool, engine, _ = self._arranged(KV_LAYOUTS["mla"])
        pool.close()
        with pytest.raises(PoolClosed):
            engine.start_save([0], [0])
        engine.close()
        engine.close()
        with pytest.raises((EngineClosed, PoolClosed)):
            engine.start_load([0], [0])

    def test_a_pool_cut_for_another_layout_is_refused(self) -> None:
        """Slots must be exactly one block."""
        memory, pool, _, _ = self._arranged(KV_LAYOUTS["mla"])
        with pytest.raises(PoolMismatch, match=str(pool.slot_bytes + 8)):
            self.make_engine(memory.layout(), HostPool(2, pool.slot_bytes + 8, pin=False))

    @pytest.mark.parametrize("slots_are_consecutive", [True, False])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("geometry", KV_LAYOUTS.values(), ids=KV_LAYOUTS.keys())
    def test_copies_that_are_pending_together_arrive_whole_and_touch_nothing_else(
        self, geometry: Geometry, dtype: torch.dtype, slots_are_consecutive: bool
    ) -> None:
        """Three saves at once, then three loads at once, each lot waited for last first."""
        memory, pool, engine, generator = self._arranged(geometry, dtype)
        sources, targets = (torch.randperm(NUM_BLOCKS, generator=generator)[:6].tolist() for _ in range(2))
        slots = torch.randperm(pool.num_slots, generator=generator)[:6].tolist()
        if slots_are_consecutive:
            slots = list(range(2, 8))
        parts = [slice(0, 1), slice(1, 4), slice(4, 6)]
        before, saved = memory.bytes(), memory.clone()
        with self.held_back(engine):
            saves = [engine.start_save(sources[part], slots[part]) for part in parts]
        for part, pending in reversed(list(zip(parts, saves, strict=True))):
            result = pending.result()
            count = part.stop - part.start
            assert (result.num_pages, result.num_bytes) == (count, count * pool.slot_bytes)
        assert torch.equal(memory.bytes(), before), "a save wrote into the KV tensors"
        others = [slot for slot in range(pool.num_slots) if slot not in slots]
        assert bool((pool.buffer[others] == 0xA5).all()), "a save wrote into other slots"

        memory.scramble(generator)
        expected, in_slots = memory.clone(), pool.buffer.clone()
        for source, target in zip(sources, targets, strict=True):
            for to_page, from_page in zip(expected.pages(target), saved.pages(source), strict=True):
                to_page.view(torch.uint8).copy_(from_page.view(torch.uint8))
        with self.held_back(engine):
            loads = [engine.start_load(slots[part], targets[part]) for part in parts]
        for pending in reversed(loads):
            pending.result()
        assert torch.equal(memory.bytes(), expected.bytes())
        assert torch.equal(pool.buffer, in_slots), "a load wrote into the slots"
        engine.close()

    def test_copies_of_one_direction_finish_in_the_order_in_which_they_were_started(self) -> None:
        """When the last is done all are, and of several that write to one place the last has won."""
        memory, pool, engine, _ = self._arranged(KV_LAYOUTS["large_pages"])
        with self.held_back(engine):
            saves = [engine.start_save([block_id], [3]) for block_id in range(NUM_BLOCKS)]
        saves[-1].result()
        assert all(pending.done() for pending in saves)
        assert torch.equal(pool.buffer[3], _bytes_of(memory, NUM_BLOCKS - 1))

        for slot in range(NUM_BLOCKS):
            pool.buffer[slot].fill_(slot)
        with self.held_back(engine):
            loads = [engine.start_load([slot], [5]) for slot in range(NUM_BLOCKS)]
        loads[-1].result()
        assert all(pending.done() for pending in loads)
        assert all(bool((page.view(torch.uint8) == NUM_BLOCKS - 1).all()) for page in memory.pages(5))
        engine.close()

    @pytest.mark.parametrize(("block_ids", "slots", "reason"), _REFUSED)
    def test_what_cannot_be_copied_is_refused_when_it_is_started_and_disturbs_no_other_copy(
        self, block_ids: Sequence[int], slots: Sequence[int], reason: str
    ) -> None:
        """The call that starts it raises; what was started before and after arrives."""
        memory, pool, engine, _ = self._arranged(KV_LAYOUTS["mla"])
        saved = memory.clone()
        with self.held_back(engine):
            before = engine.start_save([0, 1], [5, 6])
            with pytest.raises(CopyRefused, match=reason):
                engine.start_save(block_ids, slots)
            with pytest.raises(CopyRefused, match=reason):
                engine.start_load(slots, block_ids)
            after = engine.start_save([2], [7])
        for pending in (before, after):
            pending.result()
        assert torch.equal(memory.bytes(), saved.bytes())
        for block_id, slot in ((0, 5), (1, 6), (2, 7)):
            assert torch.equal(pool.buffer[slot], _bytes_of(saved, block_id))
        others = [slot for slot in range(pool.num_slots) if slot not in (5, 6, 7)]
        assert bool((pool.buffer[others] == 0xA5).all())
        engine.close()

    def test_closing_waits_for_what_is_pending(self) -> None:
        """Afterwards every copy is done and says what it moved; nothing more can be started."""
        memory, pool, engine, _ = self._arranged(KV_LAYOUTS["large_pages"])
        started = [engine.start_save([block_id], [block_id]) for block_id in range(NUM_BLOCKS)]
        engine.close()
        assert all(pending.done() for pending in started)
        for block_id in range(NUM_BLOCKS):
            assert torch.equal(pool.buffer[block_id], _bytes_of(memory, block_id))
        assert [pending.result().num_pages for pending in started] == [1] * NUM_BLOCKS
        engine.close()
        with pytest.raises(EngineClosed):
            engine.start_save([0], [0])
        with pytest.raises(EngineClosed):
            engine.start_load([0], [0])

    def test_waiting_again_says_the_same(self) -> None:
        """A result is a fact: it does not change with the number of questions."""
        _, _, engine, _ = self._arranged(KV_LAYOUTS["mla"])
        pending = engine.start_save([1, 2], [0, 1])
        first = pending.result()
        assert pending.result() == first
        assert first.duration_ns >= 0
        assert pending.done()
        engine.close()

    def test_a_copy_that_nobody_waits_for_arrives_all_the_same(self) -> None:
        """Letting go of the pending copy does not stop it."""
        memory, pool, engine, _ = self._arranged(KV_LAYOUTS["mla"])
        with self.held_back(engine):
            engine.start_save([4], [0])
            gc.collect()
        engine.close()
        assert torch.equal(pool.buffer[0], _bytes_of(memory, 4))

    def test_the_lists_may_be_reused_as_soon_as_the_call_returns(self) -> None:
        """What is copied is what the lists said when the copy was started."""
        memory, pool, engine, _ = self._arranged(KV_LAYOUTS["mla"])
        block_ids, slots = [4, 9], [0, 1]
        with self.held_back(engine):
            pending = engine.start_save(block_ids, slots)
            block_ids[:], slots[:] = [7, 7, 7], [10, 11, 12]
        assert pending.result().num_pages == 2
        assert torch.equal(pool.buffer[0], _bytes_of(memory, 4))
        assert torch.equal(pool.buffer[1], _bytes_of(memory, 9))
        assert bool((pool.buffer[2:] == 0xA5).all())
        engine.close()

    @pytest.mark.parametrize("made_in_inference_mode", [True, False])
    def test_inference_mode_makes_no_difference(self, made_in_inference_mode: bool) -> None:
        """Hooks of vLLM are called inside and outside of it, and torch keeps the mode by thread."""
        with torch.inference_mode(made_in_inference_mode):
            memory, pool, engine, _ = self._arranged(KV_LAYOUTS["large_pages"])
        with torch.inference_mode(not made_in_inference_mode):
            engine.start_save([4, 6], [0, 8]).result()
            engine.start_load([0, 8], [1, 2]).result()
        assert torch.equal(pool.buffer[0], _bytes_of(memory, 4))
        assert torch.equal(_bytes_of(memory, 2), _bytes_of(memory, 6))
        engine.close()


def _bytes_of(memory: KVMemory, block_id: int) -> torch.Tensor:
    """A block as its slot holds it, for layouts whose pages are dense."""
    return torch.cat([page.cpu().view(torch.uint8).flatten() for page in memory.pages(block_id)])
