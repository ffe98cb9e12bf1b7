"""EVICT_IDLE_ONLY: a chunk that somebody relies on is not evicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import JOB_ISSUED, JOB_SETTLED, Violation, violation
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.projections.host_slots import NO_SLOT
from kvledger.lifecycle.projections.transfers import Job
from kvledger.lifecycle.replay import ReplayedEvent

_PROMISE_ENDS = (e.BlocksAllocated, e.RequestPreempted, e.RequestFinished, e.RequestArrived)


class EvictIdleOnly:
    """No answer that is pending promised an evicted chunk, and no load in flight reads the slots it gives up.

    Verifies: this for every eviction, with promises folded from lookups and allocations, and slots from saves.
    Does not verify: taints and resets, which take chunks away from whoever relies on them by design.
    """

    rule: ClassVar[str] = "EVICT_IDLE_ONLY"
    looks_at: ClassVar[frozenset[type[e.Event]]] = frozenset(
        {
            *JOB_ISSUED,
            *JOB_SETTLED,
            e.ChunkEvicted,
            e.LookupAnswered,
            e.BlocksAllocated,
            e.RequestPreempted,
            e.RequestFinished,
            e.RequestArrived,
            e.CacheReset,
        }
    )

    def __init__(self) -> None:
        self._promised: dict[str, tuple[int, int, bytes, frozenset[bytes]]] = {}
        """Request id -> (sequence of the answer, number of chunks, key of the last, keys)."""
        self._loads: dict[int, tuple[int, set[bytes]]] = {}
        """Job id -> (sequence of the load, keys of the chunks whose slots it reads)."""
        self._saves: dict[int, Job] = {}

    def check(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Look for somebody who needs the evicted chunk."""
        event = step.event
        if isinstance(event, e.ChunkEvicted):
            yield from self._check_eviction(event, step, projections)
        elif isinstance(event, e.LookupAnswered):
            self._promise(event, step.sequence, projections)
        elif isinstance(event, e.LoadIssued | e.SaveIssued | e.TailSaveIssued):
            self._start(event, step.sequence, projections)
        elif isinstance(event, e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed):
            self._loads.pop(event.job_id, None)
            self._replace(self._saves.pop(event.job_id, None))
        elif isinstance(event, e.CacheReset):
            self._promised.clear()
        elif isinstance(event, _PROMISE_ENDS):
            self._promised.pop(event.request_id, None)

    def _start(
        self, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued, sequence: int, projections: Projections
    ) -> None:
        job = projections.transfers.get(event.job_id)
        if job is not None and isinstance(event, e.LoadIssued):
            # A chunk may also lie in a shorter image of the same block; the load does not read that one.
            slots_of, read = projections.chunks.get, frozenset(event.slots) - {NO_SLOT}
            self._loads[event.job_id] = (sequence, {k for k in job.keys if not read.isdisjoint(slots_of(k) or ())})
        elif job is not None:
            self._saves[event.job_id] = job

    def _replace(self, save: Job | None) -> None:
        """Chunks of a settled save may have moved to a longer image; loads in flight still read the shorter."""
        if save is not None:
            for _, keys in self._loads.values():
                keys.difference_update(save.keys, (key for _, key in save.earlier_keys))

    def _promise(self, event: e.LookupAnswered, sequence: int, projections: Projections) -> None:
        chunk_size = projections.geometry.chunk_size
        num_chunks = -(-(event.num_computed_tokens + event.num_external_tokens) // chunk_size)
        # Behind the whole chunks of a hit there may be a tail, which has no key and cannot be evicted.
        num_chunks = min(num_chunks, event.num_hit_tokens // chunk_size)
        keys = projections.chunk_keys.of(event.request_id)
        if not event.num_external_tokens or not 0 < num_chunks <= len(keys):
            self._promised.pop(event.request_id, None)
            return
        before = self._promised.get(event.request_id)
        # A key hashes all before it, so an equal last key means equal keys: a poll costs no set.
        if before is None or before[1:3] != (num_chunks, keys[num_chunks - 1]):
            promised = frozenset(keys[:num_chunks])
            self._promised[event.request_id] = (sequence, num_chunks, keys[num_chunks - 1], promised)

    def _check_eviction(
        self, event: e.ChunkEvicted, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation]:
        for request_id, (sequence, *_, keys) in self._promised.items():
            if event.key in keys:
                detail = f"chunk {event.key.hex()} was evicted, though the pending answer to {request_id!r} promised it"
                yield violation(self.rule, step, projections, detail, sequence, event.cause, request_id=request_id)
        for job_id, (sequence, read) in self._loads.items():
            if event.key in read:
                detail = f"chunk {event.key.hex()} was evicted, though load {job_id} is still reading it"
                request_id = event.for_request_id
                yield violation(self.rule, step, projections, detail, sequence, event.cause, request_id=request_id)
