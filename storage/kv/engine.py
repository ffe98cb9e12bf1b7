"""The interface of engines that copy whole blocks between KV tensors and host slots.

A slot holds one page, the KV of one block. Until a copy is done, **the copy's source must not be written, and the
copy's destination must not be used.**
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
    """Result of one copy: `num_pages` blocks, with `num_bytes` bytes in total, were copied in `duration_ns`.

    The duration does not include the wait for earlier copies, or for other work on the device.
    """

    num_pages: int
    num_bytes: int
    duration_ns: int


class PendingCopy(Protocol):
    """A copy that was started. The copy continues even if the caller drops this object."""

    def done(self) -> bool:
        """Whether the copy has ended or failed, so that `result` need not wait. Returns at once and never raises."""

    def precede(self) -> None:
        """Make all later work on the caller's current stream wait for the copy.

        On a device with a queue, the queue waits and the caller continues. On the CPU, the caller waits. Never raises.
        The error of a failed copy is raised by `result`.
        """

    def result(self) -> CopyResult:
        """Wait until all bytes are copied, and return the result. Later calls return the same result.

        Raises:
            Exception: The copy failed with this error.
        """


class CopyEngine(Protocol):
    """Starts copies of whole blocks. The n-th block id and the n-th slot of a call are a pair.

    A call that raises a `StorageError` (`CopyRefused`, `EngineClosed`, `PoolClosed`) has copied nothing. Later failures
    are raised by `PendingCopy.result`. A call may name a source twice, but not a destination. The lists are read during
    the call, so the caller can reuse them afterwards.

    Copies in the same direction finish in the order in which they were started. Saves and loads are not ordered among
    each other, so wait for the save of a slot before you load this slot. Use an engine from one thread only.
    """

    def start_save(self, block_ids: Sequence[int], slots: Sequence[int]) -> PendingCopy:
        """Start to copy blocks into host slots. The copy runs after all earlier work on the caller's current stream."""

    def start_load(self, slots: Sequence[int], block_ids: Sequence[int]) -> PendingCopy:
        """Start to copy host slots into blocks. The copy runs after all earlier work on the caller's current stream."""

    def close(self) -> None:
        """Wait for pending copies, then release the references to the tensors and the pool.

        The pool stays open. Closing the engine twice is harmless.
        """


def check_pool(layout: BlockLayout, pool: HostPool) -> None:
    """Check that the pool's slots have the size of one block of the layout.

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
    """Check the pairs of a copy before any byte is copied. With `writes_slots`, the slots are the destinations.

    Raises:
        CopyRefused: The lists differ in length, have unknown blocks or slots, or have a destination twice.
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
        raise CopyRefused(
            f"slots {outside} are outside 0..{num_slots - 1}; pass slots of this pool, which has {num_slots} slots"
        )
    destinations = slots if writes_slots else block_ids
    if len(set(destinations)) != len(destinations):
        repeated = _some(sorted({d for d in destinations if destinations.count(d) > 1}))
        raise CopyRefused(
            f"{'slots' if writes_slots else 'block ids'} {repeated} appear more than once as a destination; pass each "
            "destination once per call"
        )


def _some(values: Sequence[int], limit: int = 8) -> str:
    more = f" and {len(values) - limit} more" if len(values) > limit else ""
    return f"{list(values[:limit])}{more}"


def consecutive_runs(slots: Sequence[int], slots_a_piece: int) -> list[tuple[int, int]]:
    """Divide `slots` into index ranges `[start, stop)`.

    Each range has consecutive slots that are in the same pinned piece (see `pinning.py`).
    """
    starts = [i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1 or slots[i] % slots_a_piece == 0]
    return list(zip([0, *starts], [*starts, len(slots)], strict=True)) if slots else []
