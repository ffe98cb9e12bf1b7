"""Copies between KV tensors in CUDA memory and host slots, beside the caller's work or with it waiting.

NOT YET RUN ON A GPU. It was written against torch's documented stream rules and type-checked; its tests run only where
`torch.cuda.is_available()`. What moves the bytes (`cuda_staging`, `cuda_batch`) is tested on CPU tensors; streams,
events and speed are unproven until the tests have passed on a GPU.

A *lane* is a stream of its own with its own way of moving bytes. A stream does one thing after the other, and from
that come the promises: copies of a direction finish in order, and staging memory is not filled again before the
transfer that reads it is over. Two directions on two lanes use both directions of the bus at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import attrs
import torch

from kvledger.storage.kv.cuda_batch import BatchedMover, BatchUnavailable, find_batch_copy
from kvledger.storage.kv.cuda_staging import StagedMover
from kvledger.storage.kv.engine import CopyResult, check_pairs, check_pool
from kvledger.storage.kv.errors import EngineClosed
from kvledger.storage.kv.runs import runs_of_a_block

if TYPE_CHECKING:
    from kvledger.storage.kv.layout import BlockLayout
    from kvledger.storage.kv.pool import HostPool

__all__ = ["BATCHED_FROM_BYTES", "CudaCopyEngine", "OverlappingCudaEngine"]

BATCHED_FROM_BYTES = 32 << 10
"""From this mean run length on the copy engines are given the runs themselves; shorter ones are gathered by a kernel.

Each run costs the copy engine a descriptor, whatever its size. vLLM measured on an H100 that kernels win up to 28 KiB.
"""


class Mover(Protocol):
    """Gives the current stream the copies of a whole call, destinations of which appear once."""

    def move(
        self, block_ids: Sequence[int], slots: Sequence[int], host: torch.Tensor, *, writes_slots: bool
    ) -> None: ...


@attrs.frozen
class PendingCudaCopy:
    """A copy between two events of its lane's stream; None where there was nothing to copy."""

    _events: tuple[torch.cuda.Event, torch.cuda.Event] | None
    _num_pages: int
    _num_bytes: int

    def is_done(self) -> bool:
        """See `PendingCopy.is_done`."""
        if self._events is None:
            return True
        try:
            return bool(self._events[1].query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True  # CUDA reports an earlier failure here: the copy is over, and `wait` says why.

    def wait(self) -> CopyResult:
        """See `PendingCopy.wait`."""
        duration_ns = 0
        if self._events is not None:
            begun, over = self._events
            over.synchronize()
            # The stream passes `begun` only when all it waited for is over: what lies between the two is the copy.
            duration_ns = round(begun.elapsed_time(over) * 1e6)
        return CopyResult(num_pages=self._num_pages, num_bytes=self._num_bytes, duration_ns=duration_ns)


@attrs.frozen
class _Lane:
    """A stream and what moves bytes on it."""

    stream: torch.cuda.Stream
    mover: Mover

    def start(
        self, block_ids: Sequence[int], slots: Sequence[int], host: torch.Tensor, *, writes_slots: bool
    ) -> PendingCudaCopy:
        """Begin a copy that was checked, after all that the caller's current stream has been given."""
        device = self.stream.device
        events = (_timing_event(), _timing_event())
        # torch keeps inference mode by thread, and tensors made inside it may be written only inside it.
        with torch.inference_mode(), torch.cuda.device(device):
            self.stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self.stream):
                events[0].record(self.stream)
                try:
                    self.mover.move(block_ids, slots, host, writes_slots=writes_slots)
                except BaseException:
                    # Part of it may be under way, and the caller is about to think that nothing touches its blocks.
                    self.stream.synchronize()
                    raise
                events[1].record(self.stream)
        return PendingCudaCopy(events, len(slots), len(slots) * host.shape[1])


class OverlappingCudaEngine:
    """An `OverlappingCopyEngine` for tensors on one CUDA device; construction raises `PoolMismatch` and `PoolClosed`.

    A pool that is not pinned works, but CUDA then lets the CPU wait in `start_*`. Close the engine before giving up
    the KV tensors: torch's allocator does not see that a copy still needs them.

    Args:
        layout: Where the blocks lie.
        pool: Where the slots lie.
        one_lane: Both directions on one stream: for a caller who waits for each copy, half the staging memory.
        batched_from_bytes: Mean run length from which the driver's batched copy is used; None never uses it.

    Attributes:
        batch_unavailable_because: Why runs are gathered through staging memory; empty where they go directly.
    """

    def __init__(
        self,
        layout: BlockLayout,
        pool: HostPool,
        *,
        one_lane: bool = False,
        batched_from_bytes: int | None = BATCHED_FROM_BYTES,
    ) -> None:
        check_pool(layout, pool)
        self._layout: BlockLayout | None = layout
        self._pool = pool
        self.batch_unavailable_because = _why_not_batched(layout, pool, batched_from_bytes)
        save = self._lane(layout, pool)
        self._lanes: dict[bool, _Lane] = {True: save, False: save if one_lane else self._lane(layout, pool)}

    def start_save(self, block_ids: Sequence[int], slots: Sequence[int]) -> PendingCudaCopy:
        """Begin to copy blocks into slots; see `OverlappingCopyEngine.start_save`."""
        return self._start(block_ids, slots, writes_slots=True)

    def start_load(self, slots: Sequence[int], block_ids: Sequence[int]) -> PendingCudaCopy:
        """Begin to copy slots into blocks; see `OverlappingCopyEngine.start_load`."""
        return self._start(block_ids, slots, writes_slots=False)

    def close(self) -> None:
        """Wait for both streams, forget the tensors and give the staging memory back."""
        # First wait, then let go: the memory goes back to an allocator that knows nothing of these streams.
        try:
            for lane in self._lanes.values():
                lane.stream.synchronize()
        finally:
            self._lanes, self._layout = {}, None

    def _start(self, block_ids: Sequence[int], slots: Sequence[int], *, writes_slots: bool) -> PendingCudaCopy:
        layout, host = self._layout, self._pool.buffer
        if layout is None:
            raise EngineClosed("the copy engine was closed; make a new one")
        check_pairs(block_ids, slots, num_blocks=layout.num_blocks, num_slots=len(host), writes_slots=writes_slots)
        if not slots:
            return PendingCudaCopy(None, 0, 0)
        return self._lanes[writes_slots].start(block_ids, slots, host, writes_slots=writes_slots)

    def _lane(self, layout: BlockLayout, pool: HostPool) -> _Lane:
        stream = torch.cuda.Stream(device=layout.device)  # type: ignore[no-untyped-call]
        if not self.batch_unavailable_because:
            try:
                return _Lane(stream, BatchedMover(layout, pool.slot_bytes, find_batch_copy(stream)))
            except BatchUnavailable as reason:
                self.batch_unavailable_because = str(reason)
        # torch's allocator hands memory on in the order of the stream it was allocated on: that must be the user's.
        with torch.cuda.device(layout.device), torch.cuda.stream(stream):
            return _Lane(stream, StagedMover(layout, pool.slot_bytes, pool.num_slots))


class CudaCopyEngine:
    """A `CopyEngine` for tensors on one CUDA device: starts a copy and waits for it."""

    def __init__(self, layout: BlockLayout, pool: HostPool) -> None:
        self._engine = OverlappingCudaEngine(layout, pool, one_lane=True)
        self.batch_unavailable_because = self._engine.batch_unavailable_because

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> CopyResult:
        """Copy blocks into slots; see `CopyEngine.save`."""
        return self._engine.start_save(block_ids, slots).wait()

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> CopyResult:
        """Copy slots into blocks; see `CopyEngine.load`."""
        return self._engine.start_load(slots, block_ids).wait()

    def close(self) -> None:
        """Forget the tensors and give the staging memory back."""
        self._engine.close()


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _why_not_batched(layout: BlockLayout, pool: HostPool, batched_from_bytes: int | None) -> str:
    """What speaks against the batched copy before the driver is asked; empty if nothing does."""
    if batched_from_bytes is None:
        return "it was not asked for"
    if not pool.is_pinned:
        return "the pool is not pinned"
    mean_bytes = layout.block_bytes // len(runs_of_a_block(layout))
    if mean_bytes < batched_from_bytes:
        return f"a block's runs have {mean_bytes} bytes on average, and below {batched_from_bytes} gathering is faster"
    return ""
