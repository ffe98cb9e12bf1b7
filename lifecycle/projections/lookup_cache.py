"""The lookup cache: what the last lookup of each request found, and whether that is still true.

What is cached is the hit, never the answer: the answer belongs to one call's `num_computed_tokens`. A cached
hit carries the versions of everything it was made from (the request's generation and the chunk index), so it
cannot outlive them. LMCache's cached lookup carried neither and killed the engine (LMCache#2158).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections.base import Projection, Subject
from kvledger.lifecycle.projections.pool import Pool
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.ranges import Count, Generation, Int64, Ordinal

LOOKUPS: tuple[type[e.Event], ...] = (e.LookupRequested, e.LookupAnswered)
"""Events that may be written in short."""


class CachedHit(msgspec.Struct, frozen=True, gc=False):
    """The number of committed chunks from the first on, and what that was true for."""

    num_chunks: Int64
    num_keys: Count
    generation: Generation
    num_added: Count
    num_removed: Count


class _Counted(msgspec.Struct, frozen=True, gc=False):
    """A count of committed chunks, and what it was true for."""

    num_chunks: int
    last_key: bytes
    """Key of the last chunk that was counted; it hashes all before it. Empty if none was."""
    num_keys: int
    num_added: int
    num_removed: int

    def begins(self, keys: Sequence[bytes]) -> bool:
        """Whether the keys begin with those that were counted."""
        count = self.num_chunks
        return count <= len(keys) and (not count or keys[count - 1] == self.last_key)


class State(msgspec.Struct, forbid_unknown_fields=True):
    """By the ordinal of a life."""

    hits: dict[Ordinal, CachedHit] = {}


class LookupCache(Projection):
    """One hit per life of a request, found by its last lookup; the answer is in the request's record.

    A lookup that the log repeats in short is given to `fold` in full.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        chunk_size: int,
        pool: Pool,
        fold: Callable[[e.Event, int], None],
    ) -> None:
        self._fold = fold
        self._tracker = tracker
        self._chunk_size = chunk_size
        self._pool = pool
        self.state = State()
        self.index()

    def index(self) -> None:
        """Forget what was counted; it is counted again."""
        self._counted: dict[int, _Counted] = {}

    def __len__(self) -> int:
        return len(self.state.hits)

    def num_hit_chunks(self, request: RequestRecord) -> int:
        """Committed chunks from the request's first token on. Changes nothing."""
        cached = self.state.hits.get(request.ordinal)
        if (
            cached is not None
            and cached.generation == request.generation
            and cached.num_removed == self._pool.state.num_removed
            and cached.num_added == self._pool.state.num_added
            and cached.num_keys == len(request.keys)
        ):
            return cached.num_chunks
        return self.num_committed_chunks(request)

    def num_committed_chunks(self, request: RequestRecord) -> int:
        """Committed chunks from the request's first token on, whatever was answered. Changes nothing.

        It counts further from its own last count, and from the start only after a chunk was removed.
        """
        keys, pool = request.keys, self._pool
        counted = self._counted.get(request.ordinal)
        start = 0
        if counted is not None and counted.num_removed == pool.state.num_removed and counted.begins(keys):
            if counted.num_added == pool.state.num_added and counted.num_keys == len(keys):
                return counted.num_chunks
            start = counted.num_chunks
        count = start + pool.num_committed_from(keys[start:] if start else keys)
        last_key = keys[count - 1] if count else b""
        num_added, num_removed = pool.state.num_added, pool.state.num_removed
        self._counted[request.ordinal] = _Counted(count, last_key, len(keys), num_added, num_removed)
        return count

    def in_short(self, event: e.LookupRequested | e.LookupAnswered, sequence: int) -> e.Event:
        """A lookup as it is to be written, before it is folded: in short, where it is the last one once more.

        It is written in full every now and then, so that whoever lacks a part of the log soon knows it again.
        """
        record = self._tracker.get(event.request_id)
        if record is None or not record.repeats(event, sequence):
            return event
        if isinstance(event, e.LookupAnswered):
            return e.LookupAnsweredAgain(record.ordinal, event.cause)
        return e.LookupRequestedAgain(record.ordinal, event.time_ns)

    def in_full(self, event: e.Event) -> e.Event:
        """What was written in short, before or behind its fold; itself, if it repeats what is not known here.

        Readers of logs call it with each event, so that they need not know that a lookup may be short.
        """
        if not isinstance(event, e.RepeatedLookup):
            return event
        record = self._tracker.of(event.ordinal)
        return event if record is None or record.answer is None else event.after(record.answer)

    def lose(self) -> None:
        """Events are missing here, other answers perhaps among them: those from before are not what is repeated."""
        for record in self._tracker:
            record.answer = None

    @on(e.RepeatedLookup)
    def _repeated(self, event: e.RepeatedLookup, sequence: int, _subject: Subject) -> None:
        full = self.in_full(event)
        if full is not event:
            self._fold(full, sequence)

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered, _sequence: int, subject: Subject) -> None:
        record = subject.current
        if record is not None:
            self.state.hits[record.ordinal] = CachedHit(
                event.num_hit_tokens // self._chunk_size,
                len(record.keys),
                event.generation,
                self._pool.state.num_added,
                self._pool.state.num_removed,
            )

    @on(e.ChunkKeysObserved)
    def _keys_observed(self, event: e.ChunkKeysObserved, _sequence: int, subject: Subject) -> None:
        if subject.request is None:
            return
        ordinal = subject.request.ordinal
        cached = self.state.hits.get(ordinal)
        if cached is not None and event.first_chunk < cached.num_keys:
            del self.state.hits[ordinal]
        counted = self._counted.get(ordinal)
        if counted is not None and event.first_chunk < counted.num_keys:
            del self._counted[ordinal]

    @on(e.RequestPreempted, e.SessionContinued, e.RequestFinished, e.RequestArrived)
    def _forget(self, _event: e.RequestEvent, _sequence: int, subject: Subject) -> None:
        if subject.request is not None:
            self._counted.pop(subject.request.ordinal, None)
            self.state.hits.pop(subject.request.ordinal, None)

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset, _sequence: int, _subject: Subject) -> None:
        self._counted.clear()
        self.state.hits.clear()
