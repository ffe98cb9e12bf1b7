"""What one request costs in memory: every projection's entries, with its block table. The budget is the anchor."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from functools import partial

from benchmarks.figures import Cases, Figure, compared
from lifecycle_driver.sink import MemorySink

from kvledger.lifecycle import Core, Ledger, LedgerConfiguration
from kvledger.lifecycle import events as e

NUM_REQUESTS = 1000
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


def _measure(num_blocks: int) -> Sequence[Figure]:
    rounds = {_BUDGET: [2048.0 + 8 * num_blocks], "kvledger": [bytes_per_request(num_blocks)]}
    return compared("memory a request", "B", rounds, anchor=_BUDGET)


def cases(*, full: bool) -> Cases:
    """Three lengths; both forms are the same."""
    del full
    return {f"{num_blocks:,} blocks": partial(_measure, num_blocks) for num_blocks in (20, 200, 2000)}
