"""Storage of KV bytes: a host pool of slots, descriptions of the blocks in KV tensors, and engines that copy blocks.

This package knows block ids, slots and tensors. It must not know requests, chunks, tokens or any vLLM class.
"""

from __future__ import annotations

from kvledger.storage.extras import require

require(__name__, "numpy", "torch")

from kvledger.storage.kv.cuda_movers import BatchedCopy
from kvledger.storage.kv.digests import PageDigests
from kvledger.storage.kv.engine import CopyEngine, CopyResult, PendingCopy
from kvledger.storage.kv.errors import StorageError
from kvledger.storage.kv.factory import make_copy_engine
from kvledger.storage.kv.host_memory import HostMemory, available_memory, most_memory
from kvledger.storage.kv.layout import BlockLayout, LayerPages, PageSegment, describe_blocks, describe_layer
from kvledger.storage.kv.pool import HostPool
from kvledger.storage.kv.shared_memory import SharedFile, Sharing

__all__ = [
    "BatchedCopy",
    "BlockLayout",
    "CopyEngine",
    "CopyResult",
    "HostMemory",
    "HostPool",
    "LayerPages",
    "PageDigests",
    "PageSegment",
    "PendingCopy",
    "SharedFile",
    "Sharing",
    "StorageError",
    "available_memory",
    "describe_blocks",
    "describe_layer",
    "make_copy_engine",
    "most_memory",
]
