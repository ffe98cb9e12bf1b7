"""EVICT_IDLE_ONLY: a chunk that somebody relies on is not evicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.projections.host_slots import NO_SLOT
from kvledger.lifecycle.projections.transfers import JobKind
from kvledger.lifecycle.replay import Check, ReplayedEvent


class EvictIdleOnly:
    """No answer that is pending promised an evicted chunk, and no load in flight reads the slots it gives up.

    Verifies: this for every eviction, with promises folded from lookups and allocations, and slots from saves.
    Does not verify: taints and resets, which take chunks away from whoever relies on them by design.
    """

    rule: ClassVar[str] = "EVICT_IDLE_ONLY"

    def __init__(self) -> None:
        self._promised: dict[str, tuple[int, int, bytes, frozenset[bytes]]] = {}
        """Request id -> (sequence of the answer, number of chunks, key of the last, keys)."""
        self._loads: dict[int, tuple[int, set[bytes]]] = {}
        """Job id -> (sequence of the load, keys of the chunks whose slots it reads)."""

    def begin(self, projections: Projections) -> None:
        """Take over what was promised, and what loads in flight read."""
        for request_id, keys in projections.chunks.promised.items():
            self._promised[request_id] = (0, len(keys), keys[-1], frozenset(keys))
        for job in projections.transfers:
            if job.kind is JobKind.LOAD:
                slots_of, read = projections.chunks.get, frozenset(job.slots) - {NO_SLOT}
                keys_read = {key for key in job.keys if not read.isdisjoint(slots_of(key) or ())}
                self._loads[job.job_id] = (0, keys_read)

    def checks(self, _configuration: LedgerConfiguration) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        return [
            (e.ChunkEvicted, self._evicted),
            (e.LookupAnswered, self._promise),
            (e.LoadIssued, self._load_issued),
            (e.LoadCompleted, self._settled),
            (e.LoadFailed, self._settled),
            (e.SaveCompleted, self._settled),
            (e.SaveFailed, self._settled),
            (e.CacheReset, self._reset),
            (e.BlocksAllocated, self._promise_ends),
            (e.RequestPreempted, self._promise_ends),
            (e.RequestFinished, self._promise_ends),
            (e.RequestArrived, self._promise_ends),
        ]

    def _evicted(
        self, event: e.ChunkEvicted, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        return self._check_eviction(event, step, projections) if self._promised or self._loads else None

    def _reset(self, _event: e.CacheReset, _step: ReplayedEvent, _projections: Projections) -> None:
        self._promised.clear()

    def _promise_ends(self, event: e.RequestEvent, _step: ReplayedEvent, _projections: Projections) -> None:
        self._promised.pop(event.request_id, None)

    def _load_issued(self, event: e.LoadIssued, step: ReplayedEvent, projections: Projections) -> None:
        if step.job is not None:
            # A chunk may also lie in a shorter image of the same block; the load does not read that one.
            slots_of, read = projections.chunks.get, frozenset(event.slots) - {NO_SLOT}
            keys = {key for key in step.job.keys if not read.isdisjoint(slots_of(key) or ())}
            self._loads[event.job_id] = (step.sequence, keys)

    def _settled(
        self,
        event: e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed,
        step: ReplayedEvent,
        _projections: Projections,
    ) -> None:
        if self._loads:
            self._loads.pop(event.job_id, None)
            if step.job is not None and step.job.kind is JobKind.SAVE:
                # Chunks of a settled save may have moved to a longer image; loads in flight still read the shorter.
                for _, keys in self._loads.values():
                    keys.difference_update(step.job.keys, (key for _, key in step.job.earlier_keys))

    def _promise(self, event: e.LookupAnswered, step: ReplayedEvent, projections: Projections) -> None:
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
            self._promised[event.request_id] = (step.sequence, num_chunks, keys[num_chunks - 1], promised)

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
