"""How a CUDA engine gives a stream its copies: from address to address, or gathered through a device buffer.

`BatchedMover` turns a call into the addresses of every run, for a function that gives them to the copy engines at
once, so that the model keeps the cores that run kernels. `StagedMover` gathers blocks into a buffer that is laid out
like host slots, by one kernel for all layers (`rows.py`), and each run of consecutive slots is then one contiguous
transfer: many small transfers would cost more in launches than in bytes. Only contiguous memory crosses the bus,
because torch stages a strided host tensor through a temporary that a non-blocking copy does not wait for.

Nothing here names a stream: the caller makes one current, so that each step finds the one before it done. Works on CPU
tensors too, slowly; that is how it is tested without a GPU.
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
"""`copy(sources, destinations, sizes, is_source_stable)`: give the current CUDA stream these copies, in stream order
with what it was given before; stable sources may be read earlier. The first three are int64 addresses and sizes in
bytes, contiguous in CPU memory and read during the call. vLLM's `_custom_ops.swap_blocks_batch` (0.32) is one: one call
of the driver from CUDA 12.8 on, one for each run before.
"""

STAGING_BYTES = 16 << 20
"""Device memory lent to staging, of each stream that gathers; at least one slot, whatever its size.

Small, because vLLM has measured and given away the device's memory before a connector is told of the KV tensors
(`v1/worker/gpu_worker.py`, initialize_from_config, 0.32): nothing can count it in. Half a millisecond of a fast bus is
still long against the calls that it takes.
"""


class Mover(Protocol):
    """Gives the current stream the copies of a whole call, destinations of which appear once."""

    def move(self, block_ids: Sequence[int], slots: Sequence[int], host: torch.Tensor, *, writes_slots: bool) -> None:
        """From blocks into slots, or the other way."""


class BatchedMover:
    """Turns block ids and slots into the addresses of every run. Keeps no memory alive: its owner keeps the layout."""

    def __init__(self, layout: BlockLayout, slot_bytes: int, copy: BatchedCopy) -> None:
        self._copy = copy
        self._slot_bytes = slot_bytes
        # On the CPU whatever torch's default device is: the driver reads these.
        self._addresses, self._strides, self._offsets, self._sizes = (
            torch.tensor(column, dtype=torch.int64, device="cpu")
            for column in zip(
                *((r.address, r.block_stride, r.slot_offset, r.num_bytes) for r in layout.runs()), strict=True
            )
        )

    def move(self, block_ids: Sequence[int], slots: Sequence[int], host: torch.Tensor, *, writes_slots: bool) -> None:
        """Give the stream every copy of the call. No order is kept among them, and none is needed."""
        ids, to = (torch.tensor(list(n), dtype=torch.int64, device="cpu")[:, None] for n in (block_ids, slots))
        blocks = (self._addresses + ids * self._strides).flatten()
        places = (host.data_ptr() + to * self._slot_bytes + self._offsets).flatten()
        sources, destinations = (blocks, places) if writes_slots else (places, blocks)
        # Nobody writes a slot that is being loaded. Blocks are what the model writes, in the order of streams.
        self._copy(sources, destinations, self._sizes.repeat(len(slots)), not writes_slots)


@attrs.frozen
class _Gathered:
    """All runs of one length in one allocation, as rows of it and of the staging memory."""

    device: Rows
    staged: Rows


class StagedMover:
    """Gathers and scatters on the device of the layout; construct it with the stream current that it will run on."""

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
        """Give the current stream every copy of the call, batch after batch."""
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
        """Row numbers of these blocks, and of as many staged slots from the first on; `[2, rows]`, on the device."""
        staged = torch.arange(len(ids), device="cpu")
        rows = torch.stack((group.device.of(ids).flatten(), group.staged.of(staged).flatten()))
        if self._device.type != "cuda":
            return rows
        # From memory that is not pinned the CPU would wait here until the stream has come this far.
        return rows.pin_memory().to(self._device, non_blocking=True)

    def _gathered(self, runs: Sequence[BlockRun], num_blocks: int) -> _Gathered:
        row_bytes, slot_bytes = runs[0].num_bytes, self._staging.shape[1]
        offsets, strides = [run.offset for run in runs], [run.block_stride for run in runs]
        slot_offsets, slot_strides = [run.slot_offset for run in runs], [slot_bytes] * len(runs)
        # A device's allocations begin at addresses that every element divides.
        element = element_of(row_bytes, *offsets, *strides, *slot_offsets, *slot_strides)
        staging = self._staging.view(-1)
        return _Gathered(
            Rows.over(runs[0].storage, offsets, strides, num_blocks, row_bytes, element),
            Rows.over(staging, slot_offsets, slot_strides, self._staged_slots, row_bytes, element),
        )
