"""Copies between KV tensors in CUDA memory and host slots, ordered by streams. The caller does not wait for a copy.

The tests of this module need a GPU. `make gpu-check` runs them, and docs/benchmarks.md says which GPU was used.
`cuda_movers` is also tested on CPU tensors.

A copy that is not asynchronous runs on the caller's stream, in order with the caller's other work. An asynchronous copy
is enqueued by a thread, on a low-priority stream for the copy's direction. It begins after the work that the caller's
stream had when the copy was started. Work on a stream runs in order. Copies in the same direction therefore finish in
order, and the staging buffer is not filled again before the previous transfer from it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import attrs
import torch

from kvledger.storage.kv.cuda_movers import BatchedCopy, BatchedMover, Mover, StagedMover
from kvledger.storage.kv.engine import CopyResult, check_pairs, check_pool
from kvledger.storage.kv.errors import EngineClosed
from kvledger.storage.kv.layout import BlockLayout
from kvledger.storage.kv.pool import HostPool

__all__ = ["BATCHED_FROM_BYTES", "CudaCopyEngine"]

BATCHED_FROM_BYTES = 256 << 10
"""Mean length of a block's contiguous runs, in bytes, from which copies are batched (`BatchedMover`).

Shorter runs are gathered by a kernel (`StagedMover`), because each run costs the GPU's copy engine a descriptor,
whatever the length of the run. Measured on an H100 (driver 580.159.04, torch 2.11, vLLM 0.33's `swap_blocks_batch`), as
a multiple of the time of one contiguous copy:

| run length | batched | gathered |
|---|---|---|
| 128 KiB | 1.30 to 1.42 | 1.16 to 1.22 |
| 320 KiB | 1.13 to 1.15 | 1.19 to 1.22 |

Lengths between 128 and 320 KiB were not measured. `make gpu-check` measures batched and gathered copies.
"""

_Events = tuple[torch.cuda.Event, torch.cuda.Event]


@attrs.frozen
class PendingCudaCopy:
    """A copy that was started, with CUDA events directly before and after it. An empty copy has no CUDA events."""

    _given: Future[_Events | None]
    _device: torch.device
    _num_pages: int
    _num_bytes: int

    def done(self) -> bool:
        """See `PendingCopy.done`."""
        if not self._given.done():
            return False
        events = None if self._given.exception() else self._given.result()
        if events is None:
            return True
        try:
            return bool(events[1].query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True  # CUDA reports an earlier failure here: the copy is over, and `result` raises the error.

    def precede(self) -> None:
        """See `PendingCopy.precede`. The caller waits until the copy is enqueued, but not until the copy has ended."""
        wait([self._given])
        if self._given.exception() is None and (events := self._given.result()):
            torch.cuda.current_stream(self._device).wait_event(events[1])

    def result(self) -> CopyResult:
        """See `PendingCopy.result`."""
        events = self._given.result()
        duration_ns = 0
        if events is not None:
            begun, over = events
            over.synchronize()
            # The stream passes `begun` after everything it waited for, so only the copy is between the two CUDA events.
            duration_ns = round(begun.elapsed_time(over) * 1e6)
        return CopyResult(num_pages=self._num_pages, num_bytes=self._num_bytes, duration_ns=duration_ns)


class CudaCopyEngine:
    """A `CopyEngine` for tensors on one CUDA device. The constructor raises `PoolMismatch`.

    A copy that cannot be enqueued fails at once. A later failure is an error of the device, after which CUDA refuses
    all further work.

    The pool need not be pinned. If it is not pinned, enqueueing a copy waits for each transfer. Close the engine
    before you release the KV tensors, because torch's allocator does not know which tensors a running copy needs.

    Args:
        layout: Where the blocks are.
        pool: The pool with the slots.
        is_async: Whether copies run on streams of their own, one for each direction, and a thread enqueues them. If
            not, they run on the caller's stream.
        batched_copy: A function that copies contiguous runs. It is used if the runs are long enough and the pool is
            pinned. None: not used.
        batched_from_bytes: Smallest mean length of a block's runs, in bytes, for which `batched_copy` is used.
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
        self._device = layout.device
        is_long = layout.block_bytes // len(layout.runs()) >= batched_from_bytes
        self._batched_copy = batched_copy if is_long and pool.is_pinned else None
        self._streams: dict[bool, torch.cuda.Stream] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._last: torch.cuda.Event | None = None
        if is_async:
            for writes_slots in (True, False):
                # Priority 0 is the lowest; vLLM's collectives have a higher one.
                self._streams[writes_slots] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvledger-submit")
        self._movers: dict[bool, Mover] = {True: self._mover(layout, writes_slots=True)}
        self._movers[False] = self._mover(layout, writes_slots=False) if is_async else self._movers[True]

    def start_save(self, block_ids: Sequence[int], slots: Sequence[int]) -> PendingCudaCopy:
        """Start to copy blocks into slots; see `CopyEngine.start_save`."""
        return self._start(block_ids, slots, writes_slots=True)

    def start_load(self, slots: Sequence[int], block_ids: Sequence[int]) -> PendingCudaCopy:
        """Start to copy slots into blocks; see `CopyEngine.start_load`."""
        return self._start(block_ids, slots, writes_slots=False)

    def close(self) -> None:
        """Wait for the started copies, then drop the tensors and the staging memory."""
        # Wait first: the memory returns to an allocator that does not know these streams.
        self._layout = None
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        try:
            for stream in self._streams.values():
                stream.synchronize()
            if self._last is not None:
                self._last.synchronize()
        finally:
            self._movers, self._streams, self._last = {}, {}, None

    def _start(self, block_ids: Sequence[int], slots: Sequence[int], *, writes_slots: bool) -> PendingCudaCopy:
        layout, host = self._layout, self._pool.buffer
        if layout is None:
            raise EngineClosed("the copy engine was closed; create a new one with make_copy_engine")
        ids, to = tuple(block_ids), tuple(slots)
        check_pairs(ids, to, num_blocks=layout.num_blocks, num_slots=len(host), writes_slots=writes_slots)
        given: Future[_Events | None] = Future()
        pending = PendingCudaCopy(given, self._device, len(to), len(to) * host.shape[1])
        if not to:
            given.set_result(None)
        elif self._thread is None:
            stream = torch.cuda.current_stream(self._device)
            if self._last is not None:
                stream.wait_event(self._last)  # all streams of the caller share one staging buffer
            self._give(given, stream, ids, to, host, writes_slots=writes_slots)
        else:
            stream, before = self._streams[writes_slots], _event()
            before.record(torch.cuda.current_stream(self._device))
            self._thread.submit(self._give, given, stream, ids, to, host, writes_slots=writes_slots, before=before)
        return pending

    def _give(
        self,
        given: Future[_Events | None],
        stream: torch.cuda.Stream,
        block_ids: Sequence[int],
        slots: Sequence[int],
        host: torch.Tensor,
        *,
        writes_slots: bool,
        before: torch.cuda.Event | None = None,
    ) -> None:
        """Enqueue a copy on `stream`, after the CUDA event `before`. `given` gets two CUDA events around the copy."""
        try:
            events = (_event(is_timed=True), _event(is_timed=True))
            # Inference mode is per thread in torch, and tensors created inside it can be written only inside it.
            with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(stream):
                if before is not None:
                    stream.wait_event(before)
                events[0].record(stream)
                try:
                    self._movers[writes_slots].move(block_ids, slots, host, writes_slots=writes_slots)
                except BaseException:
                    # Part of the copy may be running, and the caller will assume that nothing uses its blocks.
                    stream.synchronize()
                    raise
                events[1].record(stream)
            self._last = events[1]
            given.set_result(events)
        except BaseException as error:  # noqa: BLE001 -- it is the caller's, when it asks
            given.set_exception(error)

    def _mover(self, layout: BlockLayout, *, writes_slots: bool) -> Mover:
        if self._batched_copy is not None:
            return BatchedMover(layout, self._pool.slot_bytes, self._batched_copy)
        # torch's allocator reuses memory in the order of one stream, so allocate on the stream that uses the memory.
        stream = self._streams.get(writes_slots) or torch.cuda.current_stream(layout.device)
        with torch.cuda.device(layout.device), torch.cuda.stream(stream):
            return StagedMover(layout, self._pool)


def _event(*, is_timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]
