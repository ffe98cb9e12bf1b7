"""Copies between KV tensors in CUDA memory and host slots, on streams of their own.

NOT YET RUN ON A GPU. It was written against torch's documented stream rules and type-checked; its tests run only where
`torch.cuda.is_available()`. Which bytes go where (`cuda_movers`) is tested on CPU tensors; streams, events, speed and
vLLM's batched copy are unproven until the tests have passed on a GPU.

A *lane* is a stream of its own with its own way of moving bytes. A stream does one thing after the other, and from
that come the promises: copies of a direction finish in order, and staging memory is not filled again before the
transfer that reads it is over. Two directions on two lanes use both directions of the bus at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from kvledger.storage.kv.cuda_movers import BatchedCopy, BatchedMover, Mover, StagedMover
from kvledger.storage.kv.engine import CopyResult, check_pairs, check_pool
from kvledger.storage.kv.errors import EngineClosed
from kvledger.storage.kv.layout import BlockLayout
from kvledger.storage.kv.pool import HostPool

__all__ = ["BATCHED_FROM_BYTES", "CudaCopyEngine"]

BATCHED_FROM_BYTES = 32 << 10
"""From this mean run length on the copy engines are given the runs themselves; shorter ones are gathered by a kernel.

Each run costs the copy engine a descriptor, whatever its size. vLLM measured on an H100 that kernels win up to 28 KiB.
"""


@attrs.frozen
class PendingCudaCopy:
    """A copy between two events of its lane's stream; None where there was nothing to copy."""

    _events: tuple[torch.cuda.Event, torch.cuda.Event] | None
    _num_pages: int
    _num_bytes: int

    def done(self) -> bool:
        """See `PendingCopy.done`."""
        if self._events is None:
            return True
        try:
            return bool(self._events[1].query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True  # CUDA reports an earlier failure here: the copy is over, and `result` says why.

    def result(self) -> CopyResult:
        """See `PendingCopy.result`."""
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


class CudaCopyEngine:
    """A `CopyEngine` for tensors on one CUDA device; construction raises `PoolMismatch` and `PoolClosed`.

    A pool that is not pinned works, but CUDA then lets the CPU wait in `start_*`. Close the engine before giving up
    the KV tensors: torch's allocator does not see that a copy still needs them.

    Args:
        layout: Where the blocks lie.
        pool: Where the slots lie.
        is_async: A stream for each direction; else one for both, with half the staging memory.
        batched_copy: Used for runs that are long enough, from and to a pinned pool; None: never.
        batched_from_bytes: Mean run length that is long enough.
    """

    def __init__(
        self,
        layout: BlockLayout,
        pool: HostPool,
        *,
        is_async: bool = False,
        batched_copy: BatchedCopy | None = None,
        batched_from_bytes: int = BATCHED_FROM_BYTES,
    ) -> None:
        check_pool(layout, pool)
        self._layout: BlockLayout | None = layout
        self._pool = pool
        is_long = layout.block_bytes // len(layout.runs()) >= batched_from_bytes
        self._batched_copy = batched_copy if is_long and pool.is_pinned else None
        save = self._lane(layout)
        self._lanes: dict[bool, _Lane] = {True: save, False: self._lane(layout) if is_async else save}

    def start_save(self, block_ids: Sequence[int], slots: Sequence[int]) -> PendingCudaCopy:
        """Begin to copy blocks into slots; see `CopyEngine.start_save`."""
        return self._start(block_ids, slots, writes_slots=True)

    def start_load(self, slots: Sequence[int], block_ids: Sequence[int]) -> PendingCudaCopy:
        """Begin to copy slots into blocks; see `CopyEngine.start_load`."""
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
            raise EngineClosed("the copy engine was closed; make a new one with make_copy_engine")
        check_pairs(block_ids, slots, num_blocks=layout.num_blocks, num_slots=len(host), writes_slots=writes_slots)
        if not slots:
            return PendingCudaCopy(None, 0, 0)
        return self._lanes[writes_slots].start(block_ids, slots, host, writes_slots=writes_slots)

    def _lane(self, layout: BlockLayout) -> _Lane:
        stream = torch.cuda.Stream(device=layout.device)  # type: ignore[no-untyped-call]
        if self._batched_copy is not None:
            return _Lane(stream, BatchedMover(layout, self._pool.slot_bytes, self._batched_copy))
        # torch's allocator hands memory on in the order of the stream it was allocated on: that must be the user's.
        with torch.cuda.device(layout.device), torch.cuda.stream(stream):
            return _Lane(stream, StagedMover(layout, self._pool.slot_bytes, self._pool.num_slots))


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
