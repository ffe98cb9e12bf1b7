"""The interface of engines that copy whole blocks between KV tensors and host slots.

A *page* here is one block over all layers, which is what a slot holds. Until a copy is done, **its source must not be
written and its destination must not be used.**
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from kvledger.storage.kv.errors import CopyRefused, PoolMismatch
from kvledger.storage.kv.layout import BlockLayout
from kvledger.storage.kv.pool import HostPool

__all__ = ["CopyEngine", "CopyResult", "PendingCopy"]


@attrs.frozen
class CopyResult:
    """Result of one call: it copied `num_pages` blocks over all layers, `num_bytes` in total, in `duration_ns`.

    The duration does not include the wait for earlier copies or for work on the device.
    """

    num_pages: int
    num_bytes: int
    duration_ns: int


class PendingCopy(Protocol):
    """A copy that was started. It continues even if you drop this object."""

    def done(self) -> bool:
        """Whether `result` would return or raise at once. Never blocks and never raises; true for a failed copy."""

    def precede(self) -> None:
        """Make all later work on the caller's current stream wait for the copy.

        On a device with a queue, the queue waits; otherwise the caller waits. Never raises: `result` raises the error
        of a failed copy.
        """

    def result(self) -> CopyResult:
        """Block until the bytes are in place. Later calls return the same result.

        Raises:
            Exception: The error that stopped the copy.
        """


class CopyEngine(Protocol):
    """Starts copies of whole blocks. The n-th block id belongs to the n-th slot.

    A call that raises a `StorageError` (`CopyRefused`, `EngineClosed`, `PoolClosed`) has copied nothing. Later failures
    are raised by `PendingCopy.result`. A source may appear twice, a destination may not. The lists are read during the
    call, so the caller may reuse them.

    Copies in one direction finish in the order in which they were started. There is no order between the directions:
    before you load a slot that is being saved, wait for the save. Use an engine from one thread only.
    """

    def start_save(self, block_ids: Sequence[int], slots: Sequence[int]) -> PendingCopy:
        """Start to copy device blocks into host slots, after all work given to the device before this call."""

    def start_load(self, slots: Sequence[int], block_ids: Sequence[int]) -> PendingCopy:
        """Start to copy host slots into device blocks, after all work given to the device before this call."""

    def close(self) -> None:
        """Wait for pending copies, then drop the tensors and the pool, which stays open. Closing twice is harmless."""


def check_pool(layout: BlockLayout, pool: HostPool) -> None:
    """Refuse a pool whose slots do not have the size of one block of the layout.

    Raises:
        PoolMismatch: The sizes differ.
    """
    if pool.slot_bytes != layout.block_bytes:
        raise PoolMismatch(
            f"the pool has slots of {pool.slot_bytes} bytes, but a block of the layout is {layout.block_bytes} bytes; "
            "create the pool with slot_bytes=layout.block_bytes"
        )


def check_pairs(
    block_ids: Sequence[int], slots: Sequence[int], *, num_blocks: int, num_slots: int, writes_slots: bool
) -> None:
    """Refuse pairs that cannot be copied, before any byte is copied.

    Raises:
        CopyRefused: The lists differ in length, name unknown blocks or slots, or name a destination twice.
    """
    if len(block_ids) != len(slots):
        raise CopyRefused(
            f"{len(block_ids)} block ids cannot be paired with {len(slots)} slots; pass one slot for each block"
        )
    if not block_ids:
        return
    if min(block_ids) < 0 or max(block_ids) >= num_blocks:
        outside = _some([b for b in block_ids if not 0 <= b < num_blocks])
        raise CopyRefused(
            f"block ids {outside} are outside 0..{num_blocks - 1}; pass ids of this layout's {num_blocks} blocks"
        )
    if min(slots) < 0 or max(slots) >= num_slots:
        outside = _some([s for s in slots if not 0 <= s < num_slots])
        raise CopyRefused(f"slots {outside} are outside 0..{num_slots - 1}; pass slots of this pool's {num_slots}")
    destinations = slots if writes_slots else block_ids
    if len(set(destinations)) != len(destinations):
        repeated = _some(sorted({d for d in destinations if destinations.count(d) > 1}))
        raise CopyRefused(
            f"{'slots' if writes_slots else 'block ids'} {repeated} appear more than once as a destination; write each "
            "of them once per call"
        )


def _some(values: Sequence[int], limit: int = 8) -> str:
    more = f" and {len(values) - limit} more" if len(values) > limit else ""
    return f"{list(values[:limit])}{more}"


def consecutive_runs(slots: Sequence[int], slots_a_piece: int) -> list[tuple[int, int]]:
    """Cut `slots` into index ranges `[start, stop)` of consecutive slots that lie in one piece (see `pinning.py`)."""
    starts = [i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1 or slots[i] % slots_a_piece == 0]
    return list(zip([0, *starts], [*starts, len(slots)], strict=True)) if slots else []
