"""What every copy engine must do, on KV tensors of every layout; inherit `CopyEngineContract` in a test module."""

from __future__ import annotations

from copy_engines.contract import CopyEngineContract
from copy_engines.memory import DTYPES, KV_LAYOUTS, NUM_BLOCKS, Geometry, KVMemory, make_kv_memory, printed_seed

__all__ = [
    "DTYPES",
    "KV_LAYOUTS",
    "NUM_BLOCKS",
    "CopyEngineContract",
    "Geometry",
    "KVMemory",
    "make_kv_memory",
    "printed_seed",
]
