"""Copies between KV tensors in CPU memory and host slots, almost as fast as one contiguous copy.

A block consists of contiguous runs of bytes. Runs at equal distances, for example all layers in one allocation, form
one strided array. A block is then copied by one numpy assignment, which reads and writes each byte once. The blocks of
a large copy are divided among threads, at most as many as torch would use.

numpy releases the interpreter lock during each assignment. Asynchronous copies can therefore run in an additional
thread, in order. The caller does not wait for these copies, but they use cores and memory bandwidth.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvledger.storage.kv.engine import CopyResult, check_pairs, check_pool
from kvledger.storage.kv.errors import EngineClosed
from kvledger.storage.kv.layout import BlockLayout, BlockRun
from kvledger.storage.kv.pool import HostPool

__all__ = ["THREAD_NAME", "CpuCopyEngine"]

THREAD_NAME = "kvledger-copy"
"""Prefix of the names of the threads that copy."""

_PART_BYTES = 1 << 20
"""Minimum bytes per thread. A smaller part is copied faster than another thread can wake up."""

_Bytes = npt.NDArray[np.uint8]


@attrs.frozen
class _EqualRuns:
    """Runs of bytes of equal length, at equal distances in each block, and at equal distances in each slot.

    The arrays have the shapes `[blocks, runs, bytes]` and `[slots, runs, bytes]`.
    """

    blocks: _Bytes
    slots: _Bytes

    def copy(self, block_ids: Sequence[int], slots: Sequence[int], *, writes_slots: bool) -> None:
        """Copy each pair of block and slot with one assignment. With `writes_slots`, slots are the destinations."""
        in_blocks, in_slots = self.blocks, self.slots
        if writes_slots:
            for block_id, slot in zip(block_ids, slots, strict=True):
                in_slots[slot] = in_blocks[block_id]
        else:
            for block_id, slot in zip(block_ids, slots, strict=True):
                in_blocks[block_id] = in_slots[slot]


class CpuCopy(Future[CopyResult]):
    """A copy that has ended, or that a thread will finish."""

    def precede(self) -> None:
        """See `PendingCopy.precede`. The caller waits for the copy, because the CPU has no queue."""
        wait([self])


class CpuCopyEngine:
    """A `CopyEngine` for tensors in CPU memory. The constructor raises `PoolMismatch` and `PoolClosed`.

    Without `is_async`, a copy has ended when the call returns. With `is_async`, a thread runs one copy after another.
    Saves and loads then finish in the order in which they were started.

    If the process ends without `close`, the started copies are finished first. If the pool is closed before the engine,
    copies that have not begun fail. A running copy continues, and the memory is released after it.
    """

    def __init__(self, layout: BlockLayout, pool: HostPool, *, is_async: bool = False) -> None:
        check_pool(layout, pool)
        self._layout: BlockLayout | None = layout
        self._pool = pool
        self._groups = _equal_runs(layout, pool)
        self._num_threads = torch.get_num_threads()
        self._helpers = _threads(max(1, self._num_threads - 1))
        self._thread = _threads(1) if is_async else None

    def start_save(self, block_ids: Sequence[int], slots: Sequence[int]) -> CpuCopy:
        """Start to copy blocks into slots; see `CopyEngine.start_save`."""
        return self._start(block_ids, slots, writes_slots=True)

    def start_load(self, slots: Sequence[int], block_ids: Sequence[int]) -> CpuCopy:
        """Start to copy slots into blocks; see `CopyEngine.start_load`."""
        return self._start(block_ids, slots, writes_slots=False)

    def close(self) -> None:
        """Finish the started copies, end the threads and drop the tensors."""
        self._layout = None
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._helpers.shutdown(wait=True)
        self._groups = []

    def _start(self, block_ids: Sequence[int], slots: Sequence[int], *, writes_slots: bool) -> CpuCopy:
        layout = self._layout
        if layout is None:
            raise EngineClosed("the copy engine was closed; create a new one with make_copy_engine")
        ids, to = tuple(block_ids), tuple(slots)
        num_slots = len(self._pool.buffer)
        check_pairs(ids, to, num_blocks=layout.num_blocks, num_slots=num_slots, writes_slots=writes_slots)
        copy = CpuCopy()
        if self._thread is not None:
            self._thread.submit(self._end, copy, ids, to, writes_slots=writes_slots)
        else:
            self._end(copy, ids, to, writes_slots=writes_slots)
        return copy

    def _end(self, copy: CpuCopy, ids: Sequence[int], slots: Sequence[int], *, writes_slots: bool) -> None:
        try:
            copy.set_result(self._copied(ids, slots, writes_slots=writes_slots))
        except BaseException as error:  # noqa: BLE001 -- it is the caller's, when it asks
            copy.set_exception(error)

    def _copied(self, block_ids: Sequence[int], slots: Sequence[int], *, writes_slots: bool) -> CopyResult:
        started_ns = time.perf_counter_ns()
        num_bytes = len(slots) * self._pool.buffer.shape[1]  # raises if the pool is closed
        num_parts = max(1, min(self._num_threads, num_bytes // _PART_BYTES, len(slots)))
        helped = []
        for first in range(1, num_parts):
            part = block_ids[first::num_parts], slots[first::num_parts]
            try:
                helped.append(self._helpers.submit(self._copy, *part, writes_slots=writes_slots))
            except RuntimeError:  # the interpreter is exiting, and threads take no more work
                self._copy(*part, writes_slots=writes_slots)
        self._copy(block_ids[::num_parts], slots[::num_parts], writes_slots=writes_slots)
        for part_of_it in helped:
            part_of_it.result()
        return CopyResult(num_pages=len(slots), num_bytes=num_bytes, duration_ns=time.perf_counter_ns() - started_ns)

    def _copy(self, block_ids: Sequence[int], slots: Sequence[int], *, writes_slots: bool) -> None:
        for group in self._groups:
            group.copy(block_ids, slots, writes_slots=writes_slots)


def _threads(number: int) -> ThreadPoolExecutor:
    """Return an executor whose threads can run on every core that a thread of this process can use.

    A new thread inherits the core binding of the thread that starts it. OpenMP may have bound the starting thread to a
    single core, because vLLM's CPU worker requests this.
    """
    cores: set[int] = set()
    for thread in Path("/proc/self/task").glob("*"):  # exists only on Linux
        with contextlib.suppress(ProcessLookupError):  # the thread has just ended
            cores |= os.sched_getaffinity(int(thread.name))

    def use_cores() -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)

    return ThreadPoolExecutor(number, THREAD_NAME, initializer=use_cores if cores else None)


def _equal_runs(layout: BlockLayout, pool: HostPool) -> list[_EqualRuns]:
    groups: list[list[BlockRun]] = []
    for run in layout.runs():
        if groups and _continues(groups[-1], run):
            groups[-1].append(run)
        else:
            groups.append([run])
    host = pool.buffer.numpy()
    return [
        _EqualRuns(
            _over(runs[0].storage.numpy(), layout.num_blocks, runs[0].block_stride, [run.offset for run in runs], size),
            _over(host, pool.num_slots, pool.slot_bytes, [run.slot_offset for run in runs], size),
        )
        for runs in groups
        if (size := runs[0].num_bytes)
    ]


def _continues(runs: Sequence[BlockRun], run: BlockRun) -> bool:
    """Whether `run` has the memory, size and stride of the series `runs`, and continues it at the same distances."""
    last = runs[-1]
    return (
        run.storage.data_ptr() == last.storage.data_ptr()
        and (run.num_bytes, run.block_stride) == (last.num_bytes, last.block_stride)
        and (
            len(runs) == 1
            or (run.address - last.address, run.slot_offset - last.slot_offset)
            == (last.address - runs[-2].address, last.slot_offset - runs[-2].slot_offset)
        )
    )


def _over(memory: _Bytes, count: int, stride: int, offsets: Sequence[int], num_bytes: int) -> _Bytes:
    """Return a view of `memory` with the shape `[count, len(offsets), num_bytes]`.

    `stride` is the distance in bytes between entries of the first dimension. `offsets` must be equally spaced.
    """
    step = offsets[1] - offsets[0] if len(offsets) > 1 else num_bytes
    return np.ndarray((count, len(offsets), num_bytes), np.uint8, memory, offsets[0], (stride, step, 1))
