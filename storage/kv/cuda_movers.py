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

import attrs
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


@attrs.frozen
class _Column:
    """One run of a block: `blocks` `[num_blocks, n]` in the KV tensor, `staged` `[slots, n]` in the staging buffer."""

    blocks: torch.Tensor
    staged: torch.Tensor


class StagedMover:
    """Gathers and scatters on the device of the layout; construct it with the stream current that it will run on."""

    def __init__(
        self, layout: BlockLayout, slot_bytes: int, num_slots: int, *, staging_bytes: int = _STAGING_BYTES
    ) -> None:
        self._device = layout.device
        self._staged_slots = max(1, min(num_slots, staging_bytes // slot_bytes))
        staging = torch.empty(self._staged_slots * slot_bytes, dtype=torch.uint8, device=self._device)
        self._staging = staging.view(self._staged_slots, slot_bytes)
        self._columns = _columns(layout, staging, slot_bytes, self._staged_slots)

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
                for column in self._columns:
                    column.staged[: len(batch)] = torch.index_select(column.blocks, 0, ids)
                for places, staged in transfers:
                    places.copy_(staged, non_blocking=True)
            else:
                for places, staged in transfers:
                    staged.copy_(places, non_blocking=True)
                for column in self._columns:
                    column.blocks.index_copy_(0, ids, column.staged[: len(batch)])

    def _on_device(self, indices: Sequence[int]) -> torch.Tensor:
        # From memory that is not pinned the CPU would wait here until the stream has come this far.
        pinned = torch.tensor(indices, device="cpu", pin_memory=self._device.type == "cuda")
        return pinned.to(self._device, non_blocking=True)


def _columns(layout: BlockLayout, staging: torch.Tensor, slot_bytes: int, staged_slots: int) -> list[_Column]:
    columns: list[_Column] = []
    slot_offset = 0
    for layer in layout.layers:
        for segment in layer.segments:
            num_bytes, stride, offset = segment.num_bytes, segment.block_stride_bytes, segment.offset_bytes
            item_bytes = 8 if math.gcd(num_bytes, stride, offset, slot_bytes, slot_offset) % 8 == 0 else 1
            columns.append(
                _Column(
                    blocks=_strided(layer.storage, layout.num_blocks, num_bytes, stride, offset, item_bytes),
                    staged=_strided(staging, staged_slots, num_bytes, slot_bytes, slot_offset, item_bytes),
                )
            )
            slot_offset += num_bytes
    return columns


def _strided(
    memory: torch.Tensor, count: int, num_bytes: int, stride_bytes: int, offset_bytes: int, item_bytes: int
) -> torch.Tensor:
    """`[count, num_bytes]` of 1-D uint8 `memory`, as int64 if `item_bytes` is 8: byte-wise kernels are slow."""
    if item_bytes > 1:
        memory = memory[: memory.numel() // item_bytes * item_bytes].view(torch.int64)
    return memory.as_strided(
        (count, num_bytes // item_bytes), (stride_bytes // item_bytes, 1), offset_bytes // item_bytes
    )
