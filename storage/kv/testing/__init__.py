"""Tests that every copy engine must pass, to be inherited. Needs pytest.

class TestMyEngine(CopyEngineContract):
device = "cuda"

def make_engine(self, layout, pool):
return MyEngine(layout, pool)
"""

from __future__ import annotations

from kvledger.storage.kv.testing.contract import CopyEngineContract
from kvledger.storage.kv.testing.memory import DTYPES, KV_LAYOUTS, KVMemory, make_kv_memory, printed_seed

__all__ = [
    "DTYPES",
    "KV_LAYOUTS",
    "CopyEngineContract",
    "KVMemory",
    "make_kv_memory",
    "printed_seed",
]
