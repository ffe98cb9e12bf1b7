"""HIT_PINNED: what a lookup promised is there until the scheduler has taken it up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.indices import Indices
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.replay import Check, ReplayedEvent


class HitPinned:
    """No chunk that the pending answer to a request promised is evicted.

    Verifies: this for every eviction, with promises folded from lookups, allocations and ends.
    Does not verify: taints and resets, which take chunks away from whoever relies on them by design.
    """

    rule: ClassVar[str] = "HIT_PINNED"

    def __init__(self) -> None:
        self._promised: dict[str, tuple[int, int, bytes, frozenset[bytes]]] = {}
        """Request id -> (sequence of the answer, number of chunks, key of the last, keys)."""

    def begin(self, projections: Projections) -> None:
        """Take over what was promised."""
        for request_id, keys in projections.chunks.promised.items():
            self._promised[request_id] = (0, len(keys), keys[-1], frozenset(keys))

    def checks(self, indices: Indices) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        indices.forgotten.at((e.RequestArrived, e.RequestPreempted, e.RequestFinished), self._promised)
        return [
            (e.ChunkEvicted, self._evicted),
            (e.LookupAnswered, self._promise),
            (e.CacheReset, self._reset),
            (e.BlocksAllocated, self._promise_ends),
        ]

    def _evicted(self, event: e.ChunkEvicted, step: ReplayedEvent, projections: Projections) -> list[Violation] | None:
        found = None
        for request_id, (sequence, *_, keys) in self._promised.items():
            if event.key in keys:
                detail = f"chunk {event.key.hex()} was evicted, though the pending answer to {request_id!r} promised it"
                broken = violation(self.rule, step, projections, detail, sequence, event.cause, request_id=request_id)
                found = [*(found or ()), broken]
        return found

    def _reset(self, _event: e.CacheReset, _step: ReplayedEvent, _projections: Projections) -> None:
        self._promised.clear()

    def _promise_ends(self, event: e.BlocksAllocated, _step: ReplayedEvent, _projections: Projections) -> None:
        self._promised.pop(event.request_id, None)

    def _promise(self, event: e.LookupAnswered, step: ReplayedEvent, projections: Projections) -> None:
        if not event.num_external_tokens:
            self._promised.pop(event.request_id, None)
            return
        chunk_size = projections.geometry.chunk_size
        num_chunks = -(-(event.num_computed_tokens + event.num_external_tokens) // chunk_size)
        # Behind the whole chunks of a hit there may be a tail, which has no key and cannot be evicted.
        num_chunks = min(num_chunks, event.num_hit_tokens // chunk_size)
        keys = projections.chunk_keys.of(event.request_id)
        if not 0 < num_chunks <= len(keys):
            self._promised.pop(event.request_id, None)
            return
        before = self._promised.get(event.request_id)
        # A key hashes all before it, so an equal last key means equal keys: a poll costs no set.
        if before is None or before[1:3] != (num_chunks, keys[num_chunks - 1]):
            promised = frozenset(keys[:num_chunks])
            self._promised[event.request_id] = (step.sequence, num_chunks, keys[num_chunks - 1], promised)
