"""Chooses the copy engine for the device of the KV tensors."""

from __future__ import annotations

from kvledger.storage.kv.cpu import CpuCopyEngine
from kvledger.storage.kv.cuda import CudaCopyEngine
from kvledger.storage.kv.cuda_movers import BatchedCopy
from kvledger.storage.kv.engine import CopyEngine
from kvledger.storage.kv.errors import LayoutUnsupported
from kvledger.storage.kv.layout import BlockLayout
from kvledger.storage.kv.pool import HostPool

__all__ = ["make_copy_engine"]


def make_copy_engine(
    layout: BlockLayout, pool: HostPool, *, is_async: bool = False, batched_copy: BatchedCopy | None = None
) -> CopyEngine:
    """Create the copy engine for the device of the layout's tensors.

    Args:
        layout: Where the blocks are.
        pool: The pool with the slots.
        is_async: Whether the caller continues while a copy runs. The copy then runs in a thread (CPU) or on a stream
            for its direction (CUDA).
        batched_copy: On CUDA, a function that copies contiguous runs of bytes from address to address. None: the runs
            are gathered in a staging buffer on the device.

    Raises:
        PoolMismatch: The size of the pool's slots is not the size of the layout's blocks.
        LayoutUnsupported: There is no copy engine for this device.
    """
    if layout.device.type == "cpu":
        return CpuCopyEngine(layout, pool, is_async=is_async)
    if layout.device.type == "cuda":
        return CudaCopyEngine(layout, pool, is_async=is_async, batched_copy=batched_copy)
    raise LayoutUnsupported(
        f"KV tensors are on {layout.device}, but there are copy engines only for cpu and cuda; docs/extending.md says "
        "how to write another engine"
    )
