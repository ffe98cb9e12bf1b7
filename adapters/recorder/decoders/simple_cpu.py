"""SimpleCPUOffloadConnector (`v1/simple_kv_offload/metadata.py` and `worker.py`, vLLM 0.32).

Its metadata has one list of blocks for all loads of a step, and one list for all stores (saves). Both lists have blocks
of all groups. Only loads name their requests. With `lazy_offload`, a store copies blocks that are free and cached. Such
blocks need not belong to a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvledger.adapters.recorded.payloads import JOB, REQUEST, Transferred


def copies(metadata: Any, _block_size: int) -> Iterator[tuple[str, Transferred]]:
    """Yield the copies of a step: at most one load and one save."""
    if metadata.load_gpu_blocks:
        loading = metadata.load_event_to_reqs.get(metadata.load_event, ())
        blocks = tuple(metadata.load_gpu_blocks)
        yield (loading[0] if len(loading) == 1 else ""), _copy(f"load {metadata.load_event}", blocks, is_load=True)
    if metadata.store_gpu_blocks:
        blocks = tuple(metadata.store_gpu_blocks)
        yield "", _copy(f"store {metadata.store_event}", blocks, is_load=False)


def _copy(job: str, block_ids: tuple[int, ...], *, is_load: bool) -> Transferred:
    return Transferred(job, is_load, -1, -1, block_ids, REQUEST if is_load else JOB, is_whole=True)


def completed(worker_metadata: Any) -> Iterator[tuple[str, int]]:
    """Yield (save job, number of workers that have done the job). Loads are reported by request, not by job."""
    yield from ((f"store {event}", count) for event, count in worker_metadata.completed_store_events.items())
