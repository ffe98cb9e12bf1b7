"""What one request costs in memory: every projection's entries for it, with its block table.

Budget: 2 KiB and 8 bytes a block. Run it with `python tests/benchmarks/tracker_memory.py`.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lifecycle_driver.sink import MemorySink

from kvledger.lifecycle import Core, Ledger, LedgerConfiguration
from kvledger.lifecycle import events as e

NUM_REQUESTS = 1000


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


if __name__ == "__main__":
    for num_blocks in (20, 200, 2000):
        budget = 2048 + 8 * num_blocks
        print(f"{num_blocks:5d} blocks: {bytes_per_request(num_blocks):7.0f} B a request, budget {budget} B")
