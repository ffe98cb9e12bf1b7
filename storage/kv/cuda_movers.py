"""How a CUDA engine gives a stream its copies: from address to address, or gathered through a device buffer.

`BatchedMover` turns a call into the addresses of every run, for a function that gives them to the copy engines at
once, so that the model keeps the cores that run kernels. `StagedMover` gathers blocks into a buffer that is laid out
like host slots, and each run of consecutive slots is then one contiguous transfer: many small transfers would cost more
in launches than in bytes. Only contiguous memory crosses the bus, because torch stages a strided host tensor through a
temporary that a non-blocking copy does not wait for.

Nothing here names a stream: the caller makes one current, always the same, so that each step finds the one before it
done. Works on CPU tensors too, slowly; that is how it is tested without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvledger.storage.kv.engine import consecutive_runs
from kvledger.storage.kv.layout import BlockLayout

__all__ = ["BatchedCopy", "BatchedMover", "Mover", "StagedMover"]

BatchedCopy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""`copy(sources, destinations, sizes)`: give the current CUDA stream these copies, in stream order with what it was
given before. The arguments are int64 addresses and sizes in bytes, contiguous in CPU memory and read during the call.
vLLM's `_custom_ops.swap_blocks_batch` (0.32) is one: one call of the driver from CUDA 12.8 on, one for each run before.
"""

_STAGING_BYTES = 64 << 20
"""Device memory lent to staging; at least one slot, whatever its size."""


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
        self._copy(sources, destinations, self._sizes.repeat(len(slots)))


class StagedMover:
    """Gathers and scatters on the device of the layout; construct it with the stream current that it will run on."""

    def __init__(
        self, layout: BlockLayout, slot_bytes: int, num_slots: int, *, staging_bytes: int = _STAGING_BYTES
    ) -> None:
        self._device = layout.device
        self._staged_slots = max(1, min(num_slots, staging_bytes // slot_bytes))
        self._staging = torch.empty((self._staged_slots, slot_bytes), dtype=torch.uint8, device=self._device)
        self._columns: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Of each segment the rows of all blocks and those of all staged slots."""
        slot_offset = 0
        for rows in layout.rows():
            num_bytes = rows.shape[1]
            staged = self._staging[:, slot_offset : slot_offset + num_bytes]
            is_aligned = math.gcd(num_bytes, rows.stride(0), rows.storage_offset(), slot_bytes, slot_offset) % 8 == 0
            item = torch.int64 if is_aligned else torch.uint8  # byte-wise kernels are slow
            self._columns.append((rows.view(item), staged.view(item)))
            slot_offset += num_bytes

    def move(self, block_ids: Sequence[int], slots: Sequence[int], host: torch.Tensor, *, writes_slots: bool) -> None:
        """Give the current stream every copy of the call, batch after batch."""
        by_slot = sorted(range(len(slots)), key=slots.__getitem__)
        for start in range(0, len(by_slot), self._staged_slots):
            batch = by_slot[start : start + self._staged_slots]
            ids = self._on_device([block_ids[i] for i in batch])
            batch_slots = [slots[i] for i in batch]
            transfers = [
                (host[batch_slots[first] : batch_slots[first] + last - first], self._staging[first:last])
                for first, last in consecutive_runs(batch_slots)
            ]
            if writes_slots:
                for rows, staged in self._columns:
                    staged[: len(batch)] = torch.index_select(rows, 0, ids)
                for places, staged in transfers:
                    places.copy_(staged, non_blocking=True)
            else:
                for places, staged in transfers:
                    staged.copy_(places, non_blocking=True)
                for rows, staged in self._columns:
                    rows.index_copy_(0, ids, staged[: len(batch)])

    def _on_device(self, indices: Sequence[int]) -> torch.Tensor:
        # From memory that is not pinned the CPU would wait here until the stream has come this far.
        pinned = torch.tensor(indices, device="cpu", pin_memory=self._device.type == "cuda")
        return pinned.to(self._device, non_blocking=True)
