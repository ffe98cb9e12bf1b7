"""Copies between KV tensors in CUDA memory and host slots, ordered by streams. Nobody waits for one.

Its tests need a GPU, and `make gpu-check` runs them; docs/benchmarks.md says on which GPU they have run. Which bytes go
where (`cuda_movers`) is tested on CPU tensors, too.

A copy *in the step* is given to the caller's own stream: it begins after all that the stream was given before, and what
the stream is given next begins after it. An *asynchronous* copy is given, by a thread, to a stream of its own for its
direction, of low priority, behind an event of the caller's stream. A stream does one thing after the other: that is why
copies of a direction finish in order and staging memory is not filled again before the transfer that reads it is over.
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
"""From this mean run length on the copy engines are given the runs themselves; shorter ones are gathered by a kernel.

Each run costs the copy engine a descriptor, whatever its size. Measured on an H100 (driver 580.159.04, torch 2.11,
vLLM 0.33's `swap_blocks_batch`): with runs of 128 KiB a batched copy takes 1.30 to 1.42 times as long as one contiguous
copy, and a gathered one 1.16 to 1.22. With runs of 320 KiB it is 1.13 to 1.15 and 1.19 to 1.22. Lengths between the two
were not measured. `make gpu-check` measures both ways.
"""

_Events = tuple[torch.cuda.Event, torch.cuda.Event]


@attrs.frozen
class PendingCudaCopy:
    """A copy between two events of a stream, once it was given to it; no events where there was nothing to copy."""

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
            return True  # CUDA reports an earlier failure here: the copy is over, and `result` says why.

    def precede(self) -> None:
        """See `PendingCopy.precede`. Waits for the thread that gives copies to streams, for no copy."""
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
            # The stream passes `begun` only when all it waited for is over: what lies between the two is the copy.
            duration_ns = round(begun.elapsed_time(over) * 1e6)
        return CopyResult(num_pages=self._num_pages, num_bytes=self._num_bytes, duration_ns=duration_ns)


class CudaCopyEngine:
    """A `CopyEngine` for tensors on one CUDA device; construction raises `PoolMismatch` and `PoolClosed`.

    What cannot be given to a stream has failed at once. What fails on its way is an error of the device, after which
    CUDA refuses everything: no copy fails alone.

    A pool that is not pinned works, but CUDA then waits for each transfer while it is given to the stream. Close the
    engine before giving up the KV tensors: torch's allocator does not see that a copy still needs them.

    Args:
        layout: Where the blocks lie.
        pool: Where the slots lie.
        is_async: A thread and a stream for each direction; else the caller's stream.
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
        self._device = layout.device
        is_long = layout.block_bytes // len(layout.runs()) >= batched_from_bytes
        self._batched_copy = batched_copy if is_long and pool.is_pinned else None
        self._streams: dict[bool, torch.cuda.Stream] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._last: torch.cuda.Event | None = None
        if is_async:
            for writes_slots in (True, False):
                # Of priority 0: none is lower, and vLLM's collectives run at a higher one.
                self._streams[writes_slots] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvledger-submit")
        self._movers: dict[bool, Mover] = {True: self._mover(layout, writes_slots=True)}
        self._movers[False] = self._mover(layout, writes_slots=False) if is_async else self._movers[True]

    def start_save(self, block_ids: Sequence[int], slots: Sequence[int]) -> PendingCudaCopy:
        """Begin to copy blocks into slots; see `CopyEngine.start_save`."""
        return self._start(block_ids, slots, writes_slots=True)

    def start_load(self, slots: Sequence[int], block_ids: Sequence[int]) -> PendingCudaCopy:
        """Begin to copy slots into blocks; see `CopyEngine.start_load`."""
        return self._start(block_ids, slots, writes_slots=False)

    def close(self) -> None:
        """Wait for what was started, forget the tensors and give the staging memory back."""
        # First wait, then let go: the memory goes back to an allocator that knows nothing of these streams.
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
            raise EngineClosed("the copy engine was closed; make a new one with make_copy_engine")
        ids, to = tuple(block_ids), tuple(slots)
        check_pairs(ids, to, num_blocks=layout.num_blocks, num_slots=len(host), writes_slots=writes_slots)
        given: Future[_Events | None] = Future()
        pending = PendingCudaCopy(given, self._device, len(to), len(to) * host.shape[1])
        if not to:
            given.set_result(None)
        elif self._thread is None:
            stream = torch.cuda.current_stream(self._device)
            if self._last is not None:
                stream.wait_event(self._last)  # the staging memory is one, whichever stream the caller has
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
        """Give a copy to `stream`, after `before`, and say so in `given`."""
        try:
            events = (_event(is_timed=True), _event(is_timed=True))
            # torch keeps inference mode by thread, and tensors made inside it may be written only inside it.
            with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(stream):
                if before is not None:
                    stream.wait_event(before)
                events[0].record(stream)
                try:
                    self._movers[writes_slots].move(block_ids, slots, host, writes_slots=writes_slots)
                except BaseException:
                    # Part of it may be under way, and the caller is about to think that nothing touches its blocks.
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
        # torch's allocator hands memory on in the order of the stream it was allocated on: that must be the user's.
        stream = self._streams.get(writes_slots) or torch.cuda.current_stream(layout.device)
        with torch.cuda.device(layout.device), torch.cuda.stream(stream):
            return StagedMover(layout, self._pool)


def _event(*, is_timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]
