"""Copies in CPU memory that run beside the caller's work: one thread, one engine, first come first served.

torch lets go of the interpreter lock while it gathers and scatters, so the caller runs on. The cores and the memory bus
are shared all the same: what is won is that nobody waits, not that the bytes move for free.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import attrs

from kvledger.storage.kv.cpu_engine import CpuCopyEngine
from kvledger.storage.kv.engine import CopyResult, check_pairs
from kvledger.storage.kv.errors import EngineClosed

if TYPE_CHECKING:
    from kvledger.storage.kv.layout import BlockLayout
    from kvledger.storage.kv.pool import HostPool

__all__ = ["THREAD_NAME", "OverlappingCpuEngine"]

THREAD_NAME = "kvledger-copy"
"""What the copying thread's name begins with."""


@attrs.frozen
class PendingCpuCopy:
    """A copy that the thread has done, is doing or will do."""

    _future: Future[CopyResult]

    def is_done(self) -> bool:
        """See `PendingCopy.is_done`."""
        return self._future.done()

    def wait(self) -> CopyResult:
        """See `PendingCopy.wait`."""
        return self._future.result()


class OverlappingCpuEngine:
    """An `OverlappingCopyEngine` for tensors in CPU memory; construction raises `PoolMismatch` and `PoolClosed`.

    One thread does both directions, so all copies finish in the order in which they were started. A process that ends
    without `close` finishes what was started and exits: the executor's own exit hook sees to that. A pool that is
    closed too early fails the copies that have not begun; the memory of the one that runs stays until it is over.
    """

    def __init__(self, layout: BlockLayout, pool: HostPool) -> None:
        # Its own engine, used by the thread alone: an engine's staging buffer serves one thread.
        self._engine = CpuCopyEngine(layout, pool)
        self._num_blocks = layout.num_blocks
        self._pool = pool
        self._is_closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=THREAD_NAME)

    def start_save(self, block_ids: Sequence[int], slots: Sequence[int]) -> PendingCpuCopy:
        """Begin to copy blocks into slots; see `OverlappingCopyEngine.start_save`."""
        block_ids, slots = self._checked(block_ids, slots, writes_slots=True)
        return PendingCpuCopy(self._thread.submit(self._engine.save, block_ids, slots))

    def start_load(self, slots: Sequence[int], block_ids: Sequence[int]) -> PendingCpuCopy:
        """Begin to copy slots into blocks; see `OverlappingCopyEngine.start_load`."""
        block_ids, slots = self._checked(block_ids, slots, writes_slots=False)
        return PendingCpuCopy(self._thread.submit(self._engine.load, slots, block_ids))

    def close(self) -> None:
        """Finish what was started, end the thread and forget the tensors."""
        self._is_closed = True
        self._thread.shutdown(wait=True)
        self._engine.close()

    def _checked(
        self, block_ids: Sequence[int], slots: Sequence[int], *, writes_slots: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The caller's lists as they are now; refused here, where the caller can still say what it was about."""
        if self._is_closed:
            raise EngineClosed("the copy engine was closed; make a new one with make_overlapping_engine")
        ids, to = tuple(block_ids), tuple(slots)
        num_slots = len(self._pool.buffer)
        check_pairs(ids, to, num_blocks=self._num_blocks, num_slots=num_slots, writes_slots=writes_slots)
        return ids, to
