"""Which engine copies, by the device that the KV tensors lie on."""

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
    """The engine for the device that the layout's tensors lie on.

    Args:
        layout: Where the blocks lie.
        pool: Where the slots lie.
        is_async: Whether the caller goes on while a copy runs, which takes a thread (CPU) or a second stream (CUDA);
            else it asks for each result before it does anything else.
        batched_copy: How CUDA copies runs from address to address; None gathers them through staging memory.

    Raises:
        PoolMismatch: The pool's slots are not of the layout's block size.
        LayoutUnsupported: No engine is written for that device.
    """
    if layout.device.type == "cpu":
        return CpuCopyEngine(layout, pool, is_async=is_async)
    if layout.device.type == "cuda":
        return CudaCopyEngine(layout, pool, is_async=is_async, batched_copy=batched_copy)
    raise LayoutUnsupported(
        f"KV tensors lie on {layout.device}, and there are copy engines for cpu and cuda only; docs/extending.md says "
        "how to write another"
    )
