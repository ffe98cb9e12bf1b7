"""The port that moves whole blocks between KV tensors and host slots, and the choice of who does it.

A *page* here is one block over all layers, which is what a slot holds. Engines know block ids, slots and tensors; they
must not know requests, chunks, tokens or any vLLM class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from kvledger.storage.kv.errors import (
    BlockOutOfRange,
    DuplicateDestination,
    LayoutUnsupported,
    PoolMismatch,
    SlotOutOfRange,
    UnequalLengths,
)
from kvledger.storage.kv.layout import BlockLayout
from kvledger.storage.kv.pool import HostPool

__all__ = ["CopyEngine", "CopyResult", "make_copy_engine"]


@attrs.frozen
class CopyResult:
    """What one call moved: `num_pages` blocks over all layers, `num_bytes` in all, in `duration_ns`.

    The duration is that of the copy itself, without what it waited for: earlier copies, or work on the device.
    """

    num_pages: int
    num_bytes: int
    duration_ns: int


class CopyEngine(Protocol):
    """Moves whole blocks; the n-th block id goes with the n-th slot.

    Both calls are synchronous: when they return, the bytes are in place. A call that raises a `StorageError`
    (`UnequalLengths`, `BlockOutOfRange`, `SlotOutOfRange`, `DuplicateDestination`, `EngineClosed`, `PoolClosed`) has
    moved nothing. A source may be named twice, a destination may not. One engine serves one thread.
    """

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> CopyResult:
        """Copy device blocks into host slots."""

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> CopyResult:
        """Copy host slots into device blocks."""

    def close(self) -> None:
        """Let go of the tensors and the pool, closing neither. Closing twice is harmless."""


def make_copy_engine(layout: BlockLayout, pool: HostPool) -> CopyEngine:
    """The engine for the device that the layout's tensors lie on.

    Raises:
        PoolMismatch: The pool's slots are not of the layout's block size.
        LayoutUnsupported: No engine is written for that device.
    """
    # Imported here because the engines import the port.
    if layout.device.type == "cpu":
        from kvledger.storage.kv.cpu_engine import CpuCopyEngine  # noqa: PLC0415

        return CpuCopyEngine(layout, pool)
    if layout.device.type == "cuda":
        from kvledger.storage.kv.cuda_engine import CudaCopyEngine  # noqa: PLC0415

        return CudaCopyEngine(layout, pool)
    raise no_engine_for(layout, "CopyEngine")


def no_engine_for(layout: BlockLayout, port: str) -> LayoutUnsupported:
    """The refusal of a device that no engine is written for."""
    return LayoutUnsupported(
        f"KV tensors lie on {layout.device}, and there are copy engines for cpu and cuda only; write one against the "
        f"{port} protocol and prove it with kvledger.storage.kv.testing.{port}Contract"
    )


def check_pool(layout: BlockLayout, pool: HostPool) -> None:
    """Refuse a pool whose slots are not exactly one block of the layout."""
    if pool.slot_bytes != layout.block_bytes:
        raise PoolMismatch(
            f"the pool has slots of {pool.slot_bytes} bytes and a block of the layout is {layout.block_bytes} bytes; "
            "make the pool with slot_bytes=layout.block_bytes"
        )


def check_pairs(
    block_ids: Sequence[int], slots: Sequence[int], *, num_blocks: int, num_slots: int, writes_slots: bool
) -> None:
    """Refuse what cannot be copied, before any byte moves."""
    if len(block_ids) != len(slots):
        raise UnequalLengths.for_counts(len(block_ids), len(slots))
    if not block_ids:
        return
    if min(block_ids) < 0 or max(block_ids) >= num_blocks:
        raise BlockOutOfRange.for_ids([b for b in block_ids if not 0 <= b < num_blocks], num_blocks)
    if min(slots) < 0 or max(slots) >= num_slots:
        raise SlotOutOfRange.for_slots([s for s in slots if not 0 <= s < num_slots], num_slots)
    destinations = slots if writes_slots else block_ids
    if len(set(destinations)) != len(destinations):
        repeated = sorted({d for d in destinations if destinations.count(d) > 1})
        raise DuplicateDestination.for_destinations("slots" if writes_slots else "block ids", repeated)


def consecutive_runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Cut `slots` into `[start, stop)` index ranges within which each slot follows its predecessor by one."""
    starts = [i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1]
    return list(zip([0, *starts], [*starts, len(slots)], strict=True)) if slots else []
