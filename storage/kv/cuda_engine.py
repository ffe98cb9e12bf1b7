"""Copies between KV tensors in CUDA memory and host slots.

NOT YET RUN ON A GPU. It was written against torch's documented stream rules and type-checked; its tests run only where
`torch.cuda.is_available()`. Treat its speed and its behaviour as unproven until they have passed there.

Blocks are gathered into a device buffer that is laid out like host slots, and each run of consecutive slots is then one
contiguous transfer: many small transfers would cost more in launches than in bytes. Only contiguous memory crosses the
bus, because torch stages a strided host tensor through a temporary that a non-blocking copy does not wait for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs
import torch

from kvledger.storage.kv.engine import CopyResult, check_pairs, check_pool, consecutive_runs
from kvledger.storage.kv.errors import EngineClosed

if TYPE_CHECKING:
    from kvledger.storage.kv.layout import BlockLayout
    from kvledger.storage.kv.pool import HostPool

__all__ = ["CudaCopyEngine"]

_STAGING_BYTES = 64 << 20
"""Device memory lent to staging; at least one slot, whatever its size."""


@attrs.frozen
class _Column:
    """One run of a block: `blocks` `[num_blocks, n]` in the KV tensor, `staged` `[slots, n]` in the staging buffer."""

    blocks: torch.Tensor
    staged: torch.Tensor


class CudaCopyEngine:
    """A `CopyEngine` for tensors on one CUDA device; construction raises `PoolMismatch` and `PoolClosed`.

    Copies run on a stream of their own, after all that the caller's current stream had been given, and are finished
    when the call returns. A pool that is not pinned works, slower.
    """

    def __init__(self, layout: BlockLayout, pool: HostPool) -> None:
        check_pool(layout, pool)
        self._device = layout.device
        self._layout: BlockLayout | None = layout
        self._pool = pool
        self._staged_slots = max(1, min(pool.num_slots, _STAGING_BYTES // pool.slot_bytes))
        staging = torch.empty(self._staged_slots * pool.slot_bytes, dtype=torch.uint8, device=self._device)
        self._staging = staging.view(self._staged_slots, pool.slot_bytes)
        self._columns = _columns(layout, staging, pool.slot_bytes, self._staged_slots)
        self._stream = torch.cuda.Stream(device=self._device)  # type: ignore[no-untyped-call]

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> CopyResult:
        """Copy blocks into slots; see `CopyEngine.save`."""

        def move(ids: torch.Tensor, runs: Sequence[tuple[int, int, int]], host: torch.Tensor) -> None:
            for column in self._columns:
                column.staged[: len(ids)] = torch.index_select(column.blocks, 0, ids)
            for start, stop, first_slot in runs:
                host[first_slot : first_slot + stop - start].copy_(self._staging[start:stop], non_blocking=True)

        return self._copy(block_ids, slots, move, writes_slots=True)

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> CopyResult:
        """Copy slots into blocks; see `CopyEngine.load`."""

        def move(ids: torch.Tensor, runs: Sequence[tuple[int, int, int]], host: torch.Tensor) -> None:
            for start, stop, first_slot in runs:
                self._staging[start:stop].copy_(host[first_slot : first_slot + stop - start], non_blocking=True)
            for column in self._columns:
                column.blocks.index_copy_(0, ids, column.staged[: len(ids)])

        return self._copy(block_ids, slots, move, writes_slots=False)

    def close(self) -> None:
        """Forget the tensors and give the staging memory back."""
        self._layout = None
        self._columns = []
        self._staging = torch.empty(0, dtype=torch.uint8)

    def _copy(
        self,
        block_ids: Sequence[int],
        slots: Sequence[int],
        move: Callable[[torch.Tensor, Sequence[tuple[int, int, int]], torch.Tensor], None],
        *,
        writes_slots: bool,
    ) -> CopyResult:
        started_ns = time.perf_counter_ns()
        layout, host = self._layout, self._pool.buffer
        if layout is None:
            raise EngineClosed("the copy engine was closed; make a new one with make_copy_engine")
        check_pairs(block_ids, slots, num_blocks=layout.num_blocks, num_slots=len(host), writes_slots=writes_slots)
        if len(slots) > 0:
            by_slot = sorted(range(len(slots)), key=slots.__getitem__)
            with torch.cuda.device(self._device):
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(self._stream):
                    for batch in self._batches(by_slot):
                        ids = torch.tensor([block_ids[i] for i in batch], device=self._device)
                        batch_slots = [slots[i] for i in batch]
                        runs = [(start, stop, batch_slots[start]) for start, stop in consecutive_runs(batch_slots)]
                        move(ids, runs, host)
                self._stream.synchronize()
        return CopyResult(
            num_pages=len(slots),
            num_bytes=len(slots) * layout.block_bytes,
            duration_ns=time.perf_counter_ns() - started_ns,
        )

    def _batches(self, by_slot: Sequence[int]) -> Iterator[Sequence[int]]:
        # One stream orders a batch's gather after the previous batch's transfer, so the staging buffer needs no guard.
        for start in range(0, len(by_slot), self._staged_slots):
            yield by_slot[start : start + self._staged_slots]


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
