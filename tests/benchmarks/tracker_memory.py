"""What the core costs in memory: one request, and a full host pool.

One request: every projection's entries, with its block table. The budget is the anchor.

A full host pool: resident memory of a process of its own, the objects that the garbage collector tracks, and how long a
full collection stops the scheduler because of them, in CPU time of the thread. Requests arrive, compute, save and end
through `Ledger.observe`, as on a server; the log goes nowhere.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import attrs
from benchmarks.figures import Cases, Figure, compared
from lifecycle_driver.sink import MemorySink
from msgspec import structs

from kvledger.lifecycle import Channel, Core, Ledger, LedgerConfiguration, Scheduled, StepEncoder
from kvledger.lifecycle import events as e

NUM_REQUESTS = 1000
NUM_COLLECTIONS = 5
BLOCK_SIZE = 16
MAX_STEP_REQUESTS = 256
"""Requests that compute in one step."""
_BUDGET = "2 KiB and 8 B a block"


def bytes_per_request(num_blocks: int) -> float:
    """Bytes held by the projections per looked-up request with so many blocks; the log itself is not counted."""
    ledger = Ledger(Core.standard(), LedgerConfiguration(block_size=16, chunk_size=256, num_slots=1000), MemorySink())
    gc.collect()
    tracemalloc.start()
    for ordinal in range(NUM_REQUESTS):
        request_id = f"cmpl-{ordinal:08d}-0"
        num_tokens = num_blocks * 16
        ledger.projections.fold(e.RequestArrived(request_id, ordinal, num_tokens, 0), ordinal)
        ledger.projections.fold(e.LookupRequested(request_id, 0, num_tokens, 0), ordinal)
        ledger.projections.fold(e.BlocksAllocated(request_id, tuple(range(num_blocks)), 0, 0), ordinal)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / NUM_REQUESTS


@attrs.frozen
class PoolMemory:
    """What a full host pool costs."""

    num_chunks: int
    num_bytes: int
    """Resident memory that was added, in bytes."""
    num_tracked: int
    """Objects that the garbage collector tracks."""
    pause_ms: float
    """Median CPU time of a full collection."""


def pool_memory(num_chunks: int, prompt_chunks: int) -> PoolMemory:
    """Fill a host pool with chunks of one page, by prompts of so many chunks each, in a process of its own.

    In another one, memory that was freed before would be used again and not be counted.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as child:
        return child.submit(_pool_memory, num_chunks, prompt_chunks).result()


def _pool_memory(num_chunks: int, prompt_chunks: int) -> PoolMemory:
    gc.collect()
    gc.freeze()  # as EngineCore does
    gc.disable()
    num_bytes, num_tracked = _resident_bytes(), len(gc.get_objects())
    ledger = _full_ledger(num_chunks, prompt_chunks)
    gc.collect()
    num_bytes, num_tracked = _resident_bytes() - num_bytes, len(gc.get_objects()) - num_tracked
    pauses_ms = []
    for _ in range(NUM_COLLECTIONS):
        started = time.thread_time_ns()
        gc.collect()
        pauses_ms.append((time.thread_time_ns() - started) / 1e6)
    return PoolMemory(len(ledger.projections.pool), num_bytes, num_tracked, statistics.median(pauses_ms))


def _full_ledger(num_chunks: int, prompt_chunks: int) -> Ledger:
    configuration = LedgerConfiguration(BLOCK_SIZE, BLOCK_SIZE, num_slots=num_chunks)
    sink = MemorySink()
    ledger = Ledger(Core.standard(), configuration, sink)
    steps = StepEncoder(ledger.projections)
    num_requests = num_chunks // prompt_chunks
    num_a_step = min(MAX_STEP_REQUESTS, max(1, 1024 // prompt_chunks))
    for first in range(0, num_requests, num_a_step):
        _serve(ledger, steps, range(first, min(first + num_a_step, num_requests)), prompt_chunks)
        ledger.commit()
        sink.frames.clear()
    return ledger


def _serve(ledger: Ledger, steps: StepEncoder, numbers: Sequence[int], prompt_chunks: int) -> None:
    """Let requests come and go: one step computes and saves them all."""
    num_tokens = prompt_chunks * BLOCK_SIZE + 1
    request_ids = [f"cmpl-{number:08d}-0" for number in numbers]
    for number, request_id in zip(numbers, request_ids, strict=True):
        first = number * prompt_chunks
        keys = tuple(chunk.to_bytes(16, "big") for chunk in range(first, first + prompt_chunks))
        ledger.observe(e.RequestArrived(request_id, ledger.next_ordinal, num_tokens, 0))
        ledger.observe(e.ChunkKeysObserved(request_id, 0, keys))
        ledger.observe(e.LookupRequested(request_id, 0, num_tokens, 0))
        ledger.observe(e.BlocksAllocated(request_id, tuple(range(prompt_chunks + 1)), 0, 0))
    ledger.observe(steps.encode([Scheduled(request_id, 0, num_tokens, num_tokens) for request_id in request_ids], 0))
    for request_id in request_ids:
        ledger.observe(e.RequestFinished(request_id, "FINISHED_STOPPED", num_tokens, num_tokens + 1, 0))
    ready = ledger.ready(Channel.WORKERS)
    ledger.advance(ready)
    job_ids = tuple(job.job_id for job in ready.jobs)
    report = e.TransferReported.by([0], job_ids[0], 0)
    ledger.observe(structs.replace(report, job_ids=job_ids, num_bytes=(0,) * len(job_ids)))
    ledger.advance(ledger.ready(Channel.WORKERS))


def _resident_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def _measure_pool(num_chunks: int, prompt_chunks: int) -> Sequence[Figure]:
    memory = pool_memory(num_chunks, prompt_chunks)
    return [
        Figure("memory a chunk", "kvledger", memory.num_bytes / memory.num_chunks, "B"),
        Figure("objects that the collector tracks", "kvledger", memory.num_tracked, ""),
        Figure("pause of a full collection", "kvledger", memory.pause_ms, "ms"),
    ]


def _measure(num_blocks: int) -> Sequence[Figure]:
    rounds = {_BUDGET: [2048.0 + 8 * num_blocks], "kvledger": [bytes_per_request(num_blocks)]}
    return compared("memory a request", "B", rounds, anchor=_BUDGET)


def cases(*, full: bool) -> Cases:
    """Requests of three lengths; pools of about a million chunks, or of 100,000."""
    num_chunks = 1_000_500 if full else 99_750
    requests = {f"{num_blocks:,} blocks": partial(_measure, num_blocks) for num_blocks in (20, 200, 2000)}
    pools = {
        f"a pool of {num_chunks:,} chunks, prompts of {prompt_chunks}": partial(
            _measure_pool, num_chunks, prompt_chunks
        )
        for prompt_chunks in (750, 1)
    }
    return {**requests, **pools}
