"""How close the copy engines come to one contiguous copy of the same bytes.

Each round times, one after the other, a contiguous `copy_` and every engine on the same bytes: saved, loaded, and one
half in each direction at once. The medians are compared, and only ratios of one run mean anything. Block ids are always
in random order. Slots are `consecutive`, as an allocator with room hands them out, or `random`, as in a pool that has
been full for long. Use a quiet machine: torch's threads wait for each other, and a busy core slows many short calls far
more than one long copy.

Each engine is timed from the start of a copy to its end, and apart from that for how long `start_*` kept the caller:
what a model that runs on meanwhile loses to it, but for the cores and the memory bus that both want.

CPU tensors are always measured, CUDA tensors where there is a GPU: there the contiguous copy is between pinned and
device memory, and the asynchronous engine is measured with and without vLLM's batched copy.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import attrs
import torch
from benchmarks.figures import Cases, Figure, compared
from copy_engines.batched import find_batched_copy

from kvledger.storage.kv import (
    BlockLayout,
    CopyEngine,
    HostPool,
    PendingCopy,
    describe_blocks,
    make_copy_engine,
)

KIB = 1 << 10
_ANCHOR = "one contiguous copy"


@attrs.frozen
class Case:
    """One shape of KV cache; a call moves `copied_blocks` of its `num_blocks`."""

    name: str
    num_layers: int
    page_bytes: int
    num_blocks: int
    copied_blocks: int
    one_allocation: bool


@attrs.frozen
class Timing:
    """One copy: until the caller may go on, and until the bytes are in place."""

    held_ns: int
    total_ns: int


CASES = (
    Case("32 layers x 64 KiB, one allocation", 32, 64 * KIB, 256, 64, one_allocation=True),
    Case("32 layers x 64 KiB, a tensor a layer", 32, 64 * KIB, 256, 64, one_allocation=False),
    Case("32 layers x 32 KiB, one allocation", 32, 32 * KIB, 512, 128, one_allocation=True),
    Case("32 layers x 16 KiB, one allocation", 32, 16 * KIB, 1024, 128, one_allocation=True),
    Case("32 layers x 16 KiB, a tensor a layer", 32, 16 * KIB, 1024, 128, one_allocation=False),
    Case("32 layers x 1 KiB, one allocation", 32, KIB, 4096, 512, one_allocation=True),
)


def kv_caches_of(case: Case, device: torch.device) -> dict[str, torch.Tensor]:
    """The case's KV tensors, uint8 `[num_blocks, page_bytes]` a layer."""
    shape = (case.num_blocks, case.page_bytes)
    if case.one_allocation:
        together = torch.randint(0, 256, (case.num_layers, *shape), dtype=torch.uint8, device=device)
        return {f"layer.{i}": together[i] for i in range(case.num_layers)}
    return {
        f"layer.{i}": torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for i in range(case.num_layers)
    }


def contenders(layout: BlockLayout, pool: HostPool) -> dict[str, CopyEngine]:
    """The engines to compare, by name; the synchronous one first."""
    engines = {"synchronous": make_copy_engine(layout, pool), "async": make_copy_engine(layout, pool, is_async=True)}
    if layout.device.type != "cuda":
        return engines
    from kvledger.storage.kv.cuda import CudaCopyEngine

    copy = find_batched_copy()
    if copy is None:
        print("no batched copy: there is no vLLM with swap_blocks_batch", file=sys.stderr)
        return engines
    return engines | {"batched": CudaCopyEngine(layout, pool, is_async=True, batched_copy=copy, batched_from_bytes=0)}


def measure(case: Case, num_rounds: int, device: torch.device, slot_order: str) -> list[Figure]:
    """Time copies in every direction with every engine and the contiguous copy, in turns."""
    layout = describe_blocks(
        kv_caches_of(case, device),
        num_blocks=case.num_blocks,
        block_dims={f"layer.{i}": 0 for i in range(case.num_layers)},
    )
    pool = HostPool(case.num_blocks, layout.block_bytes, pin=True)
    engines = contenders(layout, pool)
    order = random.Random(20260101)
    block_ids = order.sample(range(case.num_blocks), case.copied_blocks)
    slots = list(range(case.copied_blocks))
    if slot_order == "random":
        slots = order.sample(range(case.num_blocks), case.copied_blocks)
    num_bytes = case.copied_blocks * layout.block_bytes
    on_device = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    on_host_pool = HostPool(1, num_bytes, pin=True)
    on_host = on_host_pool.buffer.view(-1)
    half = num_bytes // 2
    streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []
    anchors: dict[str, Callable[[], object]] = {
        "save": lambda: on_host.copy_(on_device),
        "load": lambda: on_device.copy_(on_host),
        "both": lambda: _on_streams(
            streams,
            lambda: on_host[:half].copy_(on_device[:half], non_blocking=True),
            lambda: on_device[half:].copy_(on_host[half:], non_blocking=True),
        ),
    }
    figures = []
    for call, anchor in anchors.items():
        calls: dict[str, Callable[[], object]] = {_ANCHOR: anchor}
        calls |= {name: _copy_of(engine, call, block_ids, slots) for name, engine in engines.items()}
        timings: dict[str, list[Timing]] = {name: [] for name in calls}
        for _ in range(num_rounds):
            for name, copy in calls.items():
                timings[name].append(_timed(copy, device))
        total = {name: [timing.total_ns / 1e3 for timing in some] for name, some in timings.items()}
        held = {name: [timing.held_ns / 1e3 for timing in some] for name, some in timings.items()}
        figures += compared(call, "µs", total, anchor=_ANCHOR)
        figures += compared(f"the caller is kept: {call}", "µs", held, anchor=_ANCHOR)
    for engine in engines.values():
        engine.close()
    pool.close()
    on_host_pool.close()
    return figures


def _on_streams(streams: list[torch.cuda.Stream], *calls: Callable[[], object]) -> None:
    """Each call on a stream of its own; on CPU, where there are none, one after the other."""
    for number, call in enumerate(calls):
        with torch.cuda.stream(streams[number]) if streams else nullcontext():
            call()


def _copy_of(engine: CopyEngine, call: str, block_ids: list[int], slots: list[int]) -> Callable[[], list[PendingCopy]]:
    """Start to copy all of it in one direction, or one half in each."""
    half = {"save": len(slots), "load": 0, "both": len(slots) // 2}[call]

    def start() -> list[PendingCopy]:
        saved = [engine.start_save(block_ids[:half], slots[:half])] if half else []
        return saved + ([engine.start_load(slots[half:], block_ids[half:])] if half < len(slots) else [])

    return start


def _timed(call: Callable[[], object], device: torch.device) -> Timing:
    started_ns = time.perf_counter_ns()
    answer = call()
    held_ns = time.perf_counter_ns() - started_ns
    if isinstance(answer, list):
        for copy in answer:
            copy.result()
    elif device.type == "cuda":
        torch.cuda.synchronize(device)
    return Timing(held_ns, time.perf_counter_ns() - started_ns)


def cases(*, full: bool) -> Cases:
    """Every shape on the CPU and, where there is one, on a GPU; two shapes in the short form."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return {
        f"{case.name}, {slots} slots, {device}": partial(measure, case, 15 if full else 7, torch.device(device), slots)
        for device in devices
        for case in (CASES if full else CASES[:4:3])
        for slots in ("consecutive", "random")
    }
