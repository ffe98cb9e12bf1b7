"""The overlapping CPU engine keeps the contract, runs on one thread of its own and lets the process end."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from processes import finished

from kvledger.storage.kv import HostPool, LayerPages, describe_blocks, make_overlapping_engine
from kvledger.storage.kv.cpu_overlapping import THREAD_NAME, OverlappingCpuEngine
from kvledger.storage.kv.errors import LayoutUnsupported, PoolClosed, PoolMismatch
from kvledger.storage.kv.layout import BlockLayout
from kvledger.storage.kv.pending import OverlappingCopyEngine
from kvledger.storage.kv.testing import OverlappingCopyEngineContract


@contextmanager
def held_back(engine: OverlappingCopyEngine) -> Iterator[None]:
    """Keep the engine's thread busy until the context ends."""
    assert isinstance(engine, OverlappingCpuEngine)
    gate = threading.Event()
    engine._thread.submit(gate.wait)
    try:
        yield
    finally:
        gate.set()


def small_engine(num_blocks: int = 4) -> tuple[torch.Tensor, HostPool, OverlappingCpuEngine]:
    """A layer whose block b is full of b, as many slots, and an engine between them."""
    layer = torch.arange(num_blocks, dtype=torch.uint8)[:, None].repeat(1, 8)
    layout = describe_blocks({"layer": layer}, num_blocks=num_blocks, block_dims={"layer": 0})
    pool = HostPool(num_blocks, layout.block_bytes, pin=False)
    return layer, pool, OverlappingCpuEngine(layout, pool)


class TestOverlappingCpuEngine(OverlappingCopyEngineContract):
    """Everything the contract asks, on CPU tensors, with copies that are certainly pending."""

    def held_back(self, engine: OverlappingCopyEngine) -> Iterator[None]:
        """The one thread does something else."""
        return held_back(engine)


def test_cpu_tensors_get_the_overlapping_cpu_engine() -> None:
    """The engine is chosen by where the tensors lie."""
    layout = describe_blocks({"layer": torch.zeros(4, 8)}, num_blocks=4)
    engine = make_overlapping_engine(layout, HostPool(2, layout.block_bytes, pin=False))
    assert isinstance(engine, OverlappingCpuEngine)
    with pytest.raises(PoolMismatch):
        make_overlapping_engine(layout, HostPool(2, layout.block_bytes + 8, pin=False))


def test_tensors_on_a_device_without_an_engine_are_refused_with_the_way_out() -> None:
    """The message names the contract that a new engine has to pass."""
    elsewhere = LayerPages("layer", torch.empty(32, dtype=torch.uint8, device="meta"), (), 4)
    with pytest.raises(LayoutUnsupported, match="OverlappingCopyEngineContract"):
        make_overlapping_engine(BlockLayout((elsewhere,)), HostPool(1, 1, pin=False))


def test_starting_and_asking_do_not_wait_for_the_copy() -> None:
    """While the thread is kept busy both return, nothing has moved, and the copy is not done."""
    _, pool, engine = small_engine()
    with held_back(engine):
        pending = engine.start_save([3], [0])
        assert not pending.is_done()
        assert pool.buffer[0].tolist() == [0] * 8
    pending.wait()
    assert pending.is_done()
    assert pool.buffer[0].tolist() == [3] * 8


def test_time_in_the_queue_is_no_part_of_the_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that stands still while bytes move and goes on while they wait, a copy takes no time."""
    now_ns = 0
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now_ns)
    _, _, engine = small_engine()
    with held_back(engine):
        pending = engine.start_save([3], [0])
        now_ns = 10**12
    assert pending.wait().duration_ns == 0


def test_closing_waits_until_the_thread_has_done_everything() -> None:
    """Closing from another thread, it does not return while copies are held back, and none of them is lost."""
    _, pool, engine = small_engine()
    closer = threading.Thread(target=engine.close)
    with held_back(engine):
        started = [engine.start_save([block_id], [block_id]) for block_id in range(4)]
        closer.start()
        assert closer.is_alive()
    closer.join()
    assert all(pending.is_done() for pending in started)
    assert [pending.wait().num_pages for pending in started] == [1] * 4
    assert pool.buffer.tolist() == [[block_id] * 8 for block_id in range(4)]


def test_a_pool_that_is_closed_too_early_fails_the_copies_that_had_not_begun() -> None:
    """The failed copy is done, asking it does not raise, waiting does, each time; the thread lives on."""
    layer, pool, engine = small_engine()
    with held_back(engine):
        pending = engine.start_load([0], [2])
        pool.close()
    for _ in range(2):
        with pytest.raises(PoolClosed):
            pending.wait()
    assert pending.is_done()
    assert layer[2].tolist() == [2] * 8
    with pytest.raises(PoolClosed):
        engine.start_load([0], [2])
    engine.close()


def test_a_forgotten_engine_finishes_its_copies_and_gives_thread_and_tensors_back() -> None:
    """Nobody closed it, nobody waits for it, and nothing stays behind."""
    layer, pool, engine = small_engine()
    storage = weakref.ref(engine._engine._layout.layers[0].storage)
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
from kvledger.storage.kv import HostPool, describe_blocks, make_overlapping_engine

layout = describe_blocks({"layer": torch.full((64, 64), 7, dtype=torch.uint8)}, num_blocks=64, block_dims={"layer": 0})
pool = HostPool(64, layout.block_bytes, pin=False)
engine = make_overlapping_engine(layout, pool)
atexit.register(lambda: print("saved" if bool((pool.buffer == 7).all()) else "lost", flush=True))
gate = threading.Event()  # opened when the interpreter begins to shut down: what follows is pending until then
threading._register_atexit(gate.set)
engine._thread.submit(gate.wait)
for block in range(64):
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
