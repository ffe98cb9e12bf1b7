"""Copies between KV tensors in CPU memory and host slots, close to the speed of one contiguous copy.

All of a block's runs, whatever tensor they lie in, are rows of one table over the process's address space (`rows.py`),
and a whole batch is one gather (`index_select`) or one scatter (`index_copy_`) that torch spreads over its threads.

torch lets go of the interpreter lock meanwhile, so asynchronous copies run on one thread, first come first served. The
cores and the memory bus are shared all the same: what is won is that nobody waits, not that the bytes move for free.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import attrs
import torch

from kvledger.storage.kv.engine import CopyResult, check_pairs, check_pool, consecutive_runs
from kvledger.storage.kv.errors import EngineClosed
from kvledger.storage.kv.layout import BlockLayout, BlockRun
from kvledger.storage.kv.pool import HostPool
from kvledger.storage.kv.rows import Rows, element_of

__all__ = ["THREAD_NAME", "CpuCopyEngine"]

THREAD_NAME = "kvledger-copy"
"""What the name of a copying thread begins with."""

_DIRECT_RUN_BYTES = 1 << 20
"""From here on a run of consecutive slots is worth a torch call of its own; shorter ones are gathered and scattered."""

_STAGING_BYTES = 8 << 20
"""Small enough to stay in cache between the gather and the scatter, large enough to make the calls worth their cost."""


@attrs.frozen
class _RowGroup:
    """All runs of one length, as rows on both sides.

    `fills_slot` says that they are all there is in a slot, so that consecutive slots are consecutive host rows.
    """

    device: Rows
    host: Rows
    staging: torch.Tensor
    fills_slot: bool

    def copy(
        self, block_ids: torch.Tensor, slots: torch.Tensor, slot_runs: Sequence[tuple[int, int]], *, writes_slots: bool
    ) -> None:
        """Copy every pair; `slot_runs` are the index ranges of consecutive slots that are worth a call each."""
        device_rows, host_rows = self.device.of(block_ids), self.host.of(slots)
        staged = torch.ones(len(slots), dtype=torch.bool)
        for start, stop in slot_runs if self.fills_slot else ():
            staged[start:stop] = False
            chosen = device_rows[start:stop].flatten()
            first = int(host_rows[start, 0])
            neighbours = self.host.table[first : first + len(chosen)]
            if writes_slots:
                torch.index_select(self.device.table, 0, chosen, out=neighbours)
            else:
                self.device.table.index_copy_(0, chosen, neighbours)
        if not staged.any():
            return
        source, target = (self.device, self.host) if writes_slots else (self.host, self.device)
        source_rows, target_rows = (device_rows, host_rows) if writes_slots else (host_rows, device_rows)
        # Scattered on both sides: torch gathers or scatters, not both at once, so the rows pass through a small buffer.
        size = len(self.staging)
        for chosen, destined in zip(
            torch.split(source_rows[staged].flatten(), size),
            torch.split(target_rows[staged].flatten(), size),
            strict=True,
        ):
            passing = self.staging[: len(chosen)]
            torch.index_select(source.table, 0, chosen, out=passing)
            target.table.index_copy_(0, destined, passing)


class CpuCopy(Future[CopyResult]):
    """A copy that is done, or that a thread will do."""

    def precede(self) -> None:
        """See `PendingCopy.precede`: the CPU has no queue to put what follows in."""
        wait([self])


class CpuCopyEngine:
    """A `CopyEngine` for tensors in CPU memory; construction raises `PoolMismatch` and `PoolClosed`.

    Without `is_async` a copy is done when the call that starts it returns. With it, one thread does both directions, so
    all copies finish in the order in which they were started. A process that ends without `close` finishes what was
    started and exits: the executor's own exit hook sees to that. A pool that is closed too early fails the copies that
    have not begun; the memory of the one that runs stays until it is over.
    """

    def __init__(self, layout: BlockLayout, pool: HostPool, *, is_async: bool = False) -> None:
        check_pool(layout, pool)
        # The row table over the tensors owns no memory: the layout held here keeps it.
        self._layout: BlockLayout | None = layout
        self._pool = pool
        runs = layout.runs()
        lengths = sorted({run.num_bytes for run in runs})
        staging = torch.empty(max(_STAGING_BYTES, lengths[-1]), dtype=torch.uint8)
        self._groups = [
            _row_group([run for run in runs if run.num_bytes == length], layout, pool, staging) for length in lengths
        ]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=THREAD_NAME) if is_async else None

    def start_save(self, block_ids: Sequence[int], slots: Sequence[int]) -> CpuCopy:
        """Begin to copy blocks into slots; see `CopyEngine.start_save`."""
        return self._start(block_ids, slots, writes_slots=True)

    def start_load(self, slots: Sequence[int], block_ids: Sequence[int]) -> CpuCopy:
        """Begin to copy slots into blocks; see `CopyEngine.start_load`."""
        return self._start(block_ids, slots, writes_slots=False)

    def close(self) -> None:
        """Finish what was started, end the thread and forget the tensors."""
        self._layout = None
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._groups = []

    def _start(self, block_ids: Sequence[int], slots: Sequence[int], *, writes_slots: bool) -> CpuCopy:
        layout = self._layout
        if layout is None:
            raise EngineClosed("the copy engine was closed; make a new one with make_copy_engine")
        ids, to = tuple(block_ids), tuple(slots)
        num_slots = len(self._pool.buffer)
        check_pairs(ids, to, num_blocks=layout.num_blocks, num_slots=num_slots, writes_slots=writes_slots)
        copy = CpuCopy()
        if self._thread is not None:
            self._thread.submit(self._end, copy, layout, ids, to, writes_slots=writes_slots)
        else:
            self._end(copy, layout, ids, to, writes_slots=writes_slots)
        return copy

    def _end(
        self, copy: CpuCopy, layout: BlockLayout, ids: Sequence[int], slots: Sequence[int], *, writes_slots: bool
    ) -> None:
        try:
            copy.set_result(self._copied(layout, ids, slots, writes_slots=writes_slots))
        except Exception as error:  # noqa: BLE001 -- it is the caller's, when it asks
            copy.set_exception(error)

    def _copied(
        self, layout: BlockLayout, block_ids: Sequence[int], slots: Sequence[int], *, writes_slots: bool
    ) -> CopyResult:
        started_ns = time.perf_counter_ns()
        buffer = self._pool.buffer  # refuses where the pool was closed, and stays until the copy is over
        if len(slots) > 0:
            by_slot = sorted(range(len(slots)), key=slots.__getitem__)
            ordered_slots = [slots[i] for i in by_slot]
            slot_runs = [
                (start, stop)
                for start, stop in consecutive_runs(ordered_slots)
                if (stop - start) * layout.block_bytes >= _DIRECT_RUN_BYTES
            ]
            ids, targets = torch.tensor([block_ids[i] for i in by_slot]), torch.tensor(ordered_slots)
            # torch keeps the mode by thread, and an engine made inside it must also write from a thread outside it.
            with torch.inference_mode():
                for group in self._groups:
                    group.copy(ids, targets, slot_runs, writes_slots=writes_slots)
        del buffer
        return CopyResult(
            num_pages=len(slots),
            num_bytes=len(slots) * layout.block_bytes,
            duration_ns=time.perf_counter_ns() - started_ns,
        )


def _row_group(runs: Sequence[BlockRun], layout: BlockLayout, pool: HostPool, staging: torch.Tensor) -> _RowGroup:
    row_bytes = runs[0].num_bytes
    addresses, strides = [run.address for run in runs], [run.block_stride for run in runs]
    slot_offsets, slot_strides = [run.slot_offset for run in runs], [pool.slot_bytes] * len(runs)
    host = pool.buffer.view(-1)
    element = element_of(row_bytes, *addresses, *strides, host.data_ptr(), *slot_offsets, *slot_strides)
    # Tensors lie apart: their table is one over the process's memory from the first to the last of them.
    low = min(addresses)
    span = max(run.address + (layout.num_blocks - 1) * run.block_stride for run in runs) + row_bytes - low
    memory = torch.frombuffer((ctypes.c_uint8 * span).from_address(low), dtype=torch.uint8)
    rows_in_staging = staging.numel() // row_bytes
    return _RowGroup(
        device=Rows.over(memory, [start - low for start in addresses], strides, layout.num_blocks, row_bytes, element),
        host=Rows.over(host, slot_offsets, slot_strides, pool.num_slots, row_bytes, element),
        staging=staging[: rows_in_staging * row_bytes].view(element).view(rows_in_staging, -1),
        fills_slot=row_bytes * len(runs) == pool.slot_bytes,
    )
