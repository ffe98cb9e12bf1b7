"""Two ways for a CUDA engine to enqueue copies: from address to address, or through a buffer on the device.

- `BatchedMover` computes the addresses of all runs, which are contiguous bytes of a block. A function then passes the
  addresses to the GPU's copy engines in one call. No kernel runs, so the model can use all of the GPU's cores.
- `StagedMover` gathers blocks with one kernel for all layers (`rows.py`). The kernel writes into a buffer on the device
  that has the layout of host slots. Consecutive slots are then one contiguous transfer. Many small transfers would take
  more time to launch than to run. Only contiguous memory is transferred. For a strided host tensor, torch would use
  a temporary tensor, and a non-blocking copy would not wait until the temporary tensor is filled.

Both enqueue their work on the current stream, where it runs in order. To be testable without a GPU, both also work on
CPU tensors, slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import torch

from kvledger.storage.kv.engine import consecutive_runs
from kvledger.storage.kv.layout import BlockLayout, BlockRun
from kvledger.storage.kv.pool import HostPool
from kvledger.storage.kv.rows import Rows, element_of

__all__ = ["STAGING_BYTES", "BatchedCopy", "BatchedMover", "Mover", "StagedMover"]

BatchedCopy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], None]
"""`copy(sources, destinations, sizes, is_source_stable)`: a function that enqueues copies on the current CUDA stream.

The copies run after the stream's earlier work. If `is_source_stable`, the sources may be read earlier. The first three
arguments are addresses and sizes in bytes, as contiguous int64 tensors in CPU memory. They are read during the call.
vLLM's `_custom_ops.swap_blocks_batch` (0.32) is such a function. With CUDA 12.8 or newer it makes one driver call, with
older versions one call per run.
"""

STAGING_BYTES = 16 << 20
"""Bytes of device memory for the staging buffer of each stream that gathers blocks. The buffer has at least one slot.

The buffer is small because vLLM does not plan memory for it. When a connector gets the KV tensors, vLLM has already
distributed the device's memory (`v1/worker/gpu_worker.py`, initialize_from_config, 0.32). A fast bus transfers the
buffer in half a millisecond, which is long compared to the time of a call.
"""


class Mover(Protocol):
    """Enqueues copies on the current stream. No destination may appear twice in one call."""

    def move(self, block_ids: Sequence[int], slots: Sequence[int], host: torch.Tensor, *, writes_slots: bool) -> None:
        """Copy blocks into slots if `writes_slots`, else slots into blocks."""


class BatchedMover:
    """Passes the addresses of all runs to the function `copy`.

    The owner must keep a reference to the layout, because the mover does not keep the memory of the tensors alive.
    """

    def __init__(self, layout: BlockLayout, slot_bytes: int, copy: BatchedCopy) -> None:
        self._copy = copy
        self._slot_bytes = slot_bytes
        # On the CPU even if torch's default device is another: the driver reads these tensors.
        self._addresses, self._strides, self._offsets, self._sizes = (
            torch.tensor(column, dtype=torch.int64, device="cpu")
            for column in zip(
                *((r.address, r.block_stride, r.slot_offset, r.num_bytes) for r in layout.runs()), strict=True
            )
        )

    def move(self, block_ids: Sequence[int], slots: Sequence[int], host: torch.Tensor, *, writes_slots: bool) -> None:
        """Enqueue all copies of the call, in no particular order."""
        ids, to = (torch.tensor(list(n), dtype=torch.int64, device="cpu")[:, None] for n in (block_ids, slots))
        blocks = (self._addresses + ids * self._strides).flatten()
        places = (host.data_ptr() + to * self._slot_bytes + self._offsets).flatten()
        sources, destinations = (blocks, places) if writes_slots else (places, blocks)
        # Slots are stable sources: nothing writes a slot that is being loaded. The model writes blocks in stream order.
        self._copy(sources, destinations, self._sizes.repeat(len(slots)), not writes_slots)


@attrs.frozen
class _Gathered:
    """Runs of equal length in one allocation. `device` has their rows there, `staged` those in the staging buffer."""

    device: Rows
    staged: Rows


class StagedMover:
    """Gathers and scatters blocks on the layout's device, through a staging buffer.

    Create the mover while the stream that it will use is the current stream.
    """

    def __init__(self, layout: BlockLayout, pool: HostPool, *, staging_bytes: int = STAGING_BYTES) -> None:
        self._device = layout.device
        self._slots_a_piece = pool.slots_a_piece
        self._staged_slots = max(1, min(pool.num_slots, staging_bytes // pool.slot_bytes))
        self._staging = torch.empty((self._staged_slots, pool.slot_bytes), dtype=torch.uint8, device=self._device)
        alike: dict[tuple[int, int], list[BlockRun]] = {}
        for run in layout.runs():
            alike.setdefault((run.storage.data_ptr(), run.num_bytes), []).append(run)
        self._groups = [self._gathered(runs, layout.num_blocks) for runs in alike.values()]

    def move(self, block_ids: Sequence[int], slots: Sequence[int], host: torch.Tensor, *, writes_slots: bool) -> None:
        """Enqueue all copies of the call on the current stream, in batches."""
        by_slot = sorted(range(len(slots)), key=slots.__getitem__)
        for start in range(0, len(by_slot), self._staged_slots):
            batch = by_slot[start : start + self._staged_slots]
            ids = torch.tensor([block_ids[i] for i in batch], device="cpu")
            batch_slots = [slots[i] for i in batch]
            transfers = [
                (host[batch_slots[first] : batch_slots[first] + last - first], self._staging[first:last])
                for first, last in consecutive_runs(batch_slots, self._slots_a_piece)
            ]
            if writes_slots:
                for group in self._groups:
                    of_blocks, of_staging = self._rows(group, ids)
                    group.staged.table.index_copy_(0, of_staging, group.device.table.index_select(0, of_blocks))
                for places, staged in transfers:
                    places.copy_(staged, non_blocking=True)
            else:
                for places, staged in transfers:
                    staged.copy_(places, non_blocking=True)
                for group in self._groups:
                    of_blocks, of_staging = self._rows(group, ids)
                    group.device.table.index_copy_(0, of_blocks, group.staged.table.index_select(0, of_staging))

    def _rows(self, group: _Gathered, ids: torch.Tensor) -> torch.Tensor:
        """Return row numbers on the device, `[2, rows]`.

        Element 0 has the rows of the blocks `ids` in their allocation. Element 1 has the rows of the first `len(ids)`
        slots in the staging buffer.
        """
        staged = torch.arange(len(ids), device="cpu")
        rows = torch.stack((group.device.of(ids).flatten(), group.staged.of(staged).flatten()))
        if self._device.type != "cuda":
            return rows
        # From unpinned memory, the CPU would wait here until the stream reaches this copy.
        return rows.pin_memory().to(self._device, non_blocking=True)

    def _gathered(self, runs: Sequence[BlockRun], num_blocks: int) -> _Gathered:
        row_bytes, slot_bytes = runs[0].num_bytes, self._staging.shape[1]
        offsets, strides = [run.offset for run in runs], [run.block_stride for run in runs]
        slot_offsets, slot_strides = [run.slot_offset for run in runs], [slot_bytes] * len(runs)
        # Allocations on a device begin at multiples of every element size, so the offsets suffice.
        element = element_of(row_bytes, *offsets, *strides, *slot_offsets, *slot_strides)
        staging = self._staging.view(-1)
        return _Gathered(
            Rows.over(runs[0].storage, offsets, strides, num_blocks, row_bytes, element),
            Rows.over(staging, slot_offsets, slot_strides, self._staged_slots, row_bytes, element),
        )
