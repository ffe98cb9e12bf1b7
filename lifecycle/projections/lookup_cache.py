"""The lookup cache: how many chunks the last lookup of each request found, and whether that number is still true.

The lookup cache does not contain answers, because an answer depends on the `num_computed_tokens` of the call. A cached
hit is stored with the versions of its inputs (the request's generation and keys, and the pool), so an outdated hit is
never used. LMCache cached lookups without versions, and an outdated one killed the engine (LMCache#2158).
"""

from __future__ import annotations

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections.base import Projection, Subject
from kvledger.lifecycle.projections.pool import Pool
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.ranges import Count, Generation, Ordinal


class CachedHit(msgspec.Struct, frozen=True, gc=False):
    """Number of committed chunks of a request, from chunk 0 on, and the versions on which this number depends."""

    num_chunks: Count
    last_key: bytes
    """Key of the last chunk of the hit, which also hashes all chunks before it; empty if the hit has no chunk."""
    next_key: bytes | None
    """Key of the first chunk after the hit; None if it was not known."""
    generation: Generation
    num_added: Count
    num_torn: Count


class State(msgspec.Struct, forbid_unknown_fields=True):
    """The cached hits."""

    hits: dict[Ordinal, CachedHit] = {}
    """Ordinal → the hit of the life's last lookup."""


class LookupCache(Projection):
    """Counts the hit of each lookup, and keeps one hit per life. The answer is in the request's record."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.state = State()

    def __len__(self) -> int:
        return len(self.state.hits)

    def num_hit_chunks(self, request: RequestRecord) -> int:
        """Return the number of the request's committed chunks before its first uncommitted one. Changes nothing.

        Only chunks that may have changed since the last lookup are counted again. Chunks leave the pool from the end of
        a prefix, so all chunks of the last hit are in the pool as long as its last chunk is.
        """
        keys, pool = request.keys, self._pool.state
        hit, start = self.state.hits.get(request.ordinal), 0
        if (
            hit is not None
            and hit.generation == request.generation
            and hit.num_torn == pool.num_torn
            and hit.num_chunks <= len(keys)
            and (not hit.num_chunks or keys[hit.num_chunks - 1] == hit.last_key)
        ):
            start = hit.num_chunks
            while start and keys[start - 1] not in pool.committed:
                start -= 1
            next_key = keys[start] if start < len(keys) else None
            if hit.num_added == pool.num_added and next_key == hit.next_key:
                return start
        return self._pool.num_committed(keys, start)

    @on(e.LookupRequested)
    def _requested(self, _event: e.LookupRequested, _sequence: int, subject: Subject) -> None:
        record = subject.request
        if record is not None:
            count, pool, keys = self.num_hit_chunks(record), self._pool.state, record.keys
            last_key, next_key = keys[count - 1] if count else b"", keys[count] if count < len(keys) else None
            self.state.hits[record.ordinal] = CachedHit(
                count, last_key, next_key, record.generation, pool.num_added, pool.num_torn
            )

    @on(e.RequestFinished, e.RequestArrived)
    def _forget(self, _event: e.RequestEvent, _sequence: int, subject: Subject) -> None:
        if subject.request is not None:
            self.state.hits.pop(subject.request.ordinal, None)
