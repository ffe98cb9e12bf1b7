"""Chooses the copy engine by the device of the KV tensors."""

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
    """Create the engine for the device of the layout's tensors.

    Args:
        layout: The blocks.
        pool: The slots.
        is_async: Whether the caller continues while a copy runs. The copy then uses a thread (CPU) or a stream for its
            direction (CUDA).
        batched_copy: Copies runs from address to address on CUDA. None gathers them through staging memory.

    Raises:
        PoolMismatch: The pool's slots do not have the size of the layout's blocks.
        LayoutUnsupported: There is no engine for this device.
    """
    if layout.device.type == "cpu":
        return CpuCopyEngine(layout, pool, is_async=is_async)
    if layout.device.type == "cuda":
        return CudaCopyEngine(layout, pool, is_async=is_async, batched_copy=batched_copy)
    raise LayoutUnsupported(
        f"KV tensors are on {layout.device}, but there are copy engines only for cpu and cuda; docs/extending.md says "
        "how to write another"
    )
