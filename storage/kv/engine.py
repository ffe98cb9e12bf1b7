"""The port that moves whole blocks between KV tensors and host slots.

A *page* here is one block over all layers, which is what a slot holds. Engines know block ids, slots and tensors; they
must not know requests, chunks, tokens or any vLLM class. Until a copy is done, **its source must not be written and its
destination must not be used.**
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
    """What one call moved: `num_pages` blocks over all layers, `num_bytes` in all, in `duration_ns`.

    The duration is that of the copy itself, without what it waited for: earlier copies, or work on the device.
    """

    num_pages: int
    num_bytes: int
    duration_ns: int


class PendingCopy(Protocol):
    """A copy that was started. Letting go of this object does not stop it."""

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once. Never blocks and never raises: a failed copy is done."""

    def precede(self) -> None:
        """Let all that the device is given from now on, on the caller's current stream, come after the copy.

        A device that keeps order in a queue waits there; where there is none the caller does. Never raises: what
        stopped the copy is the result's to say.
        """

    def result(self) -> CopyResult:
        """Block until the bytes are in place. May be called again, and then returns the same.

        Raises:
            Exception: Whatever stopped the copy.
        """


class CopyEngine(Protocol):
    """Starts copies of whole blocks; the n-th block id goes with the n-th slot.

    A call that raises a `StorageError` (`CopyRefused`, `EngineClosed`, `PoolClosed`) has moved nothing. What fails
    later is raised by `PendingCopy.result`. A source may be named twice, a destination may not. The lists are read
    during the call: the caller may reuse them.

    Copies of one direction finish in the order in which they were started. Between the two directions there is no
    order: who loads a slot that is being saved waits for the save first. One engine serves one thread.
    """

    def start_save(self, block_ids: Sequence[int], slots: Sequence[int]) -> PendingCopy:
        """Begin to copy device blocks into host slots, after all that the device was given before this call."""

    def start_load(self, slots: Sequence[int], block_ids: Sequence[int]) -> PendingCopy:
        """Begin to copy host slots into device blocks, after all that the device was given before this call."""

    def close(self) -> None:
        """Wait for what is pending, then let go of the tensors and the pool, closing neither. Twice is harmless."""


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
            "of them once a call"
        )


def _some(values: Sequence[int], limit: int = 8) -> str:
    more = f" and {len(values) - limit} more" if len(values) > limit else ""
    return f"{list(values[:limit])}{more}"


def consecutive_runs(slots: Sequence[int], slots_a_piece: int) -> list[tuple[int, int]]:
    """Cut `slots` into `[start, stop)` index ranges within which each slot follows its predecessor in one piece."""
    starts = [i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1 or slots[i] % slots_a_piece == 0]
    return list(zip([0, *starts], [*starts, len(slots)], strict=True)) if slots else []
