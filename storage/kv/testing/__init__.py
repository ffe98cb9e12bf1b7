"""Tests that every copy engine must pass, to be inherited. Needs pytest.

    class TestMyEngine(CopyEngineContract):
        device = "cuda"

        def make_engine(self, layout, pool):
            return MyEngine(layout, pool)

`OverlappingCopyEngineContract` is for engines that start copies; it contains the other contract.
"""

from __future__ import annotations

from kvledger.storage.kv.testing.memory import DTYPES, KV_LAYOUTS, KVMemory, make_kv_memory, printed_seed
from kvledger.storage.kv.testing.overlapping import OverlappingCopyEngineContract
from kvledger.storage.kv.testing.synchronous import CopyEngineContract

__all__ = [
    "DTYPES",
    "KV_LAYOUTS",
    "CopyEngineContract",
    "KVMemory",
    "OverlappingCopyEngineContract",
    "make_kv_memory",
    "printed_seed",
]
