"""The CPU engine keeps the contract, also where batches are cut and tensors lie apart, at once and on its thread."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from copy_engines import CopyEngineContract, printed_seed
from processes import finished

from kvledger.storage.kv import HostPool, LayerPages, describe_blocks, make_copy_engine
from kvledger.storage.kv.cpu import THREAD_NAME, CpuCopyEngine
from kvledger.storage.kv.engine import CopyEngine, consecutive_runs
from kvledger.storage.kv.errors import EngineClosed, LayoutUnsupported, PoolClosed
from kvledger.storage.kv.layout import BlockLayout


@contextmanager
def held_back(engine: CopyEngine) -> Iterator[None]:
    """Keep the engine's thread busy until the context ends."""
    assert isinstance(engine, CpuCopyEngine)
    assert engine._thread is not None
    gate = threading.Event()
    engine._thread.submit(gate.wait)
    try:
        yield
    finally:
        gate.set()


def small_engine(num_blocks: int = 4) -> tuple[torch.Tensor, HostPool, CpuCopyEngine]:
    """A layer whose block b is full of b, as many slots, and an engine between them."""
    layer = torch.arange(num_blocks, dtype=torch.uint8)[:, None].repeat(1, 8)
    layout = describe_blocks({"layer": layer}, num_blocks=num_blocks, block_dims={"layer": 0})
    pool = HostPool(num_blocks, layout.block_bytes, pin=False)
    return layer, pool, CpuCopyEngine(layout, pool, is_async=True)


class TestCpuCopyEngine(CopyEngineContract):
    """Everything the contract asks, on CPU tensors, each copy done when the call returns."""


class TestAsynchronousCpuCopyEngine(CopyEngineContract):
    """The same on a thread, with copies that are certainly pending."""

    def make_engine(self, layout: BlockLayout, pool: HostPool) -> CopyEngine:
        """The engine under test."""
        return make_copy_engine(layout, pool, is_async=True)

    def held_back(self, engine: CopyEngine) -> Iterator[None]:
        """The one thread does something else."""
        return held_back(engine)


def test_cpu_tensors_get_the_cpu_engine() -> None:
    """The engine is chosen by where the tensors lie."""
    layout = describe_blocks({"layer": torch.zeros(4, 8)}, num_blocks=4)
    assert isinstance(make_copy_engine(layout, HostPool(2, layout.block_bytes, pin=False)), CpuCopyEngine)


def test_tensors_on_a_device_without_an_engine_are_refused_with_the_way_out() -> None:
    """The message names the page that says how to write one."""
    elsewhere = LayerPages("layer", torch.empty(32, dtype=torch.uint8, device="meta"), (), 4)
    pool = HostPool(1, 1, pin=False)
    with pytest.raises(LayoutUnsupported, match="how to write another"):
        make_copy_engine(BlockLayout((elsewhere,)), pool)


@pytest.mark.parametrize("page_bytes", [(64 << 10,) * 3, (64 << 10, 32 << 10, 64 << 10)], ids=["equal", "unequal"])
@pytest.mark.parametrize("one_allocation", [True, False])
def test_copies_that_threads_share_arrive_whole(
    page_bytes: tuple[int, ...], one_allocation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page where it belongs, whichever of the threads has copied it."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
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

    engine.start_save(block_ids, slots)
    for block_id, slot in zip(block_ids, slots, strict=True):
        assert torch.equal(pool.buffer[slot], originals[block_id])
    for layer in layers:
        layer.zero_()
    engine.start_load(slots, block_ids)
    assert torch.equal(torch.cat(layers, dim=1), originals)


def test_layers_that_touch_in_one_block_and_not_in_the_next_stay_apart() -> None:
    """Neighbouring runs are joined only where they neighbour each other in every block."""
    raw = torch.arange(64, dtype=torch.uint8)
    layers = {"a": raw.as_strided((2, 8), (40, 1), 0), "b": raw.as_strided((2, 8), (16, 1), 8)}
    layout = describe_blocks(layers, num_blocks=2)
    pool = HostPool(2, layout.block_bytes, pin=False)
    make_copy_engine(layout, pool).start_save([0, 1], [0, 1])
    assert pool.buffer.tolist() == [list(range(16)), [*range(40, 48), *range(24, 32)]]


def test_bytes_at_odd_addresses_are_copied() -> None:
    """Where nothing is aligned the engine falls back to single bytes."""
    raw = torch.arange(200, dtype=torch.uint8)
    layer = raw.as_strided((9, 7), (13, 1), 3)
    layout = describe_blocks({"layer": layer}, num_blocks=9)
    pool = HostPool(4, layout.block_bytes, pin=False)
    make_copy_engine(layout, pool).start_save([8, 0], [1, 3])
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
    assert engine.start_save([2], [0]).result().num_bytes == 2 * 8 * 4
    shared.zero_()
    engine.start_load([0], [2])
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
    engine.start_save([1], [0])
    assert pool.buffer[0].tolist() == [3] * 8
    engine.close()
    assert storage() is None
    with pytest.raises(EngineClosed):
        engine.start_save([1], [0])


def test_consecutive_slots_are_grouped() -> None:
    """Runs are index ranges, and an empty list has none."""
    assert consecutive_runs([3, 4, 5, 9, 11, 12], 100) == [(0, 3), (3, 4), (4, 6)]
    assert consecutive_runs([3, 4, 5, 9, 11, 12], 4) == [(0, 1), (1, 3), (3, 4), (4, 5), (5, 6)]
    assert consecutive_runs([], 4) == []


# --- on a thread of its own ---------------------------------------------------------------------------------------


def test_starting_and_asking_do_not_wait_for_the_copy() -> None:
    """While the thread is kept busy both return, nothing has moved, and the copy is not done."""
    _, pool, engine = small_engine()
    with held_back(engine):
        pending = engine.start_save([3], [0])
        assert not pending.done()
        assert pool.buffer[0].tolist() == [0] * 8
    pending.result()
    assert pending.done()
    assert pool.buffer[0].tolist() == [3] * 8


def test_time_in_the_queue_is_no_part_of_the_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that stands still while bytes move and goes on while they wait, a copy takes no time."""
    now_ns = 0
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now_ns)
    _, _, engine = small_engine()
    with held_back(engine):
        pending = engine.start_save([3], [0])
        now_ns = 10**12
    assert pending.result().duration_ns == 0


def test_closing_waits_until_the_thread_has_done_everything() -> None:
    """Closing from another thread, it does not return while copies are held back, and none of them is lost."""
    _, pool, engine = small_engine()
    closer = threading.Thread(target=engine.close)
    with held_back(engine):
        started = [engine.start_save([block_id], [block_id]) for block_id in range(4)]
        closer.start()
        assert closer.is_alive()
    closer.join()
    assert all(pending.done() for pending in started)
    assert [pending.result().num_pages for pending in started] == [1] * 4
    assert pool.buffer.tolist() == [[block_id] * 8 for block_id in range(4)]


def test_a_pool_that_is_closed_too_early_fails_the_copies_that_had_not_begun() -> None:
    """The failed copy is done, asking it does not raise, waiting does, each time; the thread lives on."""
    layer, pool, engine = small_engine()
    with held_back(engine):
        pending = engine.start_load([0], [2])
        pool.close()
    for _ in range(2):
        with pytest.raises(PoolClosed):
            pending.result()
    assert pending.done()
    assert layer[2].tolist() == [2] * 8
    with pytest.raises(PoolClosed):
        engine.start_load([0], [2])
    engine.close()


def test_a_forgotten_engine_finishes_its_copies_and_gives_thread_and_tensors_back() -> None:
    """Nobody closed it, nobody waits for it, and nothing stays behind."""
    layer, pool, engine = small_engine()
    storage = weakref.ref(engine._layout.layers[0].storage)
    gate = threading.Event()
    engine._thread.submit(gate.wait)
    engine.start_save([3], [1])
    (thread,) = engine._thread._threads
    assert thread.name.startswith(THREAD_NAME)
    del engine
    gc.collect()
    gate.set()
    thread.join()
    assert pool.buffer[1].tolist() == [3] * 8
    assert storage() is None
    assert layer[3].tolist() == [3] * 8


NEVER_CLOSED = """
import atexit, sys, threading, torch
from kvledger.storage.kv import HostPool, describe_blocks, make_copy_engine

torch.set_num_threads(2)
pages = torch.full((64, 1 << 16), 7, dtype=torch.uint8)
layout = describe_blocks({"layer": pages}, num_blocks=64, block_dims={"layer": 0})
pool = HostPool(64, layout.block_bytes, pin=False)
engine = make_copy_engine(layout, pool, is_async=True)
atexit.register(lambda: print("saved" if bool((pool.buffer == 7).all()) else "lost", flush=True))
gate = threading.Event()  # opened when the interpreter begins to shut down: what follows is pending until then
threading._register_atexit(gate.set)
engine._thread.submit(gate.wait)
engine.start_save(range(48), range(48))  # two threads would share it, and no thread takes anything by then
for block in range(48, 64):
    engine.start_save([block], [block])
print("leaving", not bool((pool.buffer == 7).any()), flush=True)
if "raise" in sys.argv:
    raise RuntimeError("the caller dies")
"""


@pytest.mark.parametrize("how", ["return", "raise"])
def test_a_process_that_never_closes_the_engine_ends_and_loses_no_copy(how: str) -> None:
    """What was started is finished, then the interpreter exits, whether the main thread returned or raised."""
    done = finished([sys.executable, "-c", NEVER_CLOSED, how])
    assert done.stdout.split("\n")[:2] == ["leaving True", "saved"], done.stderr
    assert done.returncode == (1 if how == "raise" else 0)


def test_threads_that_copy_are_not_bound_to_the_core_of_the_thread_that_made_the_engine() -> None:
    """OpenMP binds that one, where vLLM's CPU worker says so, and new threads inherit it: all would share one core."""
    cores = os.sched_getaffinity(0)
    if len(cores) == 1:
        pytest.skip("this process may use one core only")
    used: list[set[int]] = []

    def bound() -> None:
        os.sched_setaffinity(0, {min(cores)})
        _, _, engine = small_engine()
        assert engine._thread is not None
        used.extend(threads.submit(os.sched_getaffinity, 0).result() for threads in (engine._thread, engine._helpers))
        engine.close()

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert used == [cores, cores]
