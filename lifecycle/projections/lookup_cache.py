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
from kvledger.lifecycle.projections.base import Projection
from kvledger.lifecycle.projections.chunk_index import ChunkIndex
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.ranges import Count, Generation, Int64, JobId, NumTokens, Ordinal
from kvledger.lifecycle.ranges import Sequence as SequenceNumber
from kvledger.lifecycle.subject import Subject

_WINDOW = e.MissReason.WINDOW.value
_LOOKUPS = (e.LookupRequested, e.LookupAnswered)
_IN_FULL_AFTER_EVENTS = 1024


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


class PendingAnswer(msgspec.Struct, frozen=True, gc=False):
    """What the scheduler was answered and has not claimed yet."""

    generation: Generation
    num_computed_tokens: NumTokens
    num_tokens: NumTokens
    num_hit_tokens: Int64
    num_external_tokens: Int64
    is_async: bool
    miss_reason: str
    miss_cause: SequenceNumber
    sequence: SequenceNumber
    written_at: SequenceNumber
    """Sequence number of the last answer like this one that the log has in full."""

    def as_event(self, request_id: str, ordinal: int, cause: int) -> e.LookupAnswered:
        """The answer, given to that life upon another question."""
        return e.LookupAnswered(
            request_id,
            ordinal,
            self.generation,
            self.num_computed_tokens,
            self.num_tokens,
            self.num_hit_tokens,
            self.num_external_tokens,
            self.is_async,
            self.miss_reason,
            self.miss_cause,
            cause,
        )


def _repeats(last: PendingAnswer, event: e.LookupRequested | e.LookupAnswered, ordinal: int, sequence: int) -> bool:
    """Whether the log says it already, and not too long ago."""
    if sequence - last.written_at > _IN_FULL_AFTER_EVENTS:
        return False
    if isinstance(event, e.LookupAnswered):
        return event == last.as_event(event.request_id, ordinal, event.cause)
    return event.num_computed_tokens == last.num_computed_tokens and event.num_tokens == last.num_tokens


class State(msgspec.Struct, forbid_unknown_fields=True):
    """All by the ordinal of a life."""

    hits: dict[Ordinal, CachedHit] = {}
    pending: dict[Ordinal, PendingAnswer] = {}
    taken_up: dict[Ordinal, PendingAnswer] = {}
    num_deferred: dict[Ordinal, Count] = {}
    deferred_for: dict[Ordinal, JobId] = {}
    """The job for which the last lookup was deferred."""
    junctions: dict[Ordinal, Int64] = {}


class LookupCache(Projection):
    """One replaceable slot per life of a request, written by the last lookup. What is asked is about the present one.

    What is answered concerns one generation of a life; an answer to any other is none. A lookup that the log repeats in
    short is given to `fold` in full, once more.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        chunk_size: int,
        chunk_index: ChunkIndex,
        fold: Callable[[e.Event, int], None],
    ) -> None:
        self._fold = fold
        self._tracker = tracker
        self._chunk_size = chunk_size
        self._chunk_index = chunk_index
        self.state = State()
        self.index()

    def index(self) -> None:
        """Forget what was counted; it is counted again."""
        self._counted: dict[int, _Counted] = {}

    def __len__(self) -> int:
        return len(self.state.hits)

    def pending(self, request_id: str) -> PendingAnswer | None:
        """The last answer that no allocation has claimed."""
        return self.state.pending.get(self._tracker.ordinal(request_id))

    def taken_up(self, request_id: str) -> PendingAnswer | None:
        """The answer that the request's last allocation claimed, if a lookup preceded it."""
        return self.state.taken_up.get(self._tracker.ordinal(request_id))

    def junction(self, request_id: str) -> int:
        """Where another request's prefix ends that its last lookup could not use, because of a window; 0: nowhere."""
        return self.state.junctions.get(self._tracker.ordinal(request_id), 0)

    def num_deferred(self, request_id: str) -> int:
        """How often in a row the scheduler was asked to ask again."""
        return self.state.num_deferred.get(self._tracker.ordinal(request_id), 0)

    def deferred_for(self, request_id: str) -> int:
        """The job for which the last lookup was deferred; 0 if it was answered."""
        return self.state.deferred_for.get(self._tracker.ordinal(request_id), 0)

    def next_deferral(self, request_id: str, job_id: int, *, is_shared: bool) -> int:
        """Return how often in a row lookups were deferred if the next one is, for this job.

        With `is_shared`, a load that was waited for before is not counted again: it ends by itself, in a report or as
        overdue.
        """
        ordinal = self._tracker.ordinal(request_id)
        count = self.state.num_deferred.get(ordinal, 0)
        return count if count and is_shared and self.state.deferred_for.get(ordinal) == job_id else count + 1

    def num_hit_chunks(self, request_id: str, generation: int) -> int:
        """Committed chunks from the request's first token on. Changes nothing."""
        ordinal = self._tracker.ordinal(request_id)
        cached = self.state.hits.get(ordinal)
        if (
            cached is not None
            and cached.generation == generation
            and cached.num_removed == self._chunk_index.state.num_removed
            and cached.num_added == self._chunk_index.state.num_added
            and cached.num_keys == len(self._keys_of(ordinal))
        ):
            return cached.num_chunks
        return self.num_committed_chunks(ordinal)

    def num_committed_chunks(self, ordinal: int) -> int:
        """Committed chunks from the life's first token on, whatever was answered. Changes nothing.

        It counts further from its own last count, and from the start only after a chunk was removed.
        """
        keys, index = self._keys_of(ordinal), self._chunk_index
        counted = self._counted.get(ordinal)
        start = 0
        if counted is not None and counted.num_removed == index.state.num_removed and counted.begins(keys):
            if counted.num_added == index.state.num_added and counted.num_keys == len(keys):
                return counted.num_chunks
            start = counted.num_chunks
        count = start + index.num_committed_from(keys[start:] if start else keys)
        last_key = keys[count - 1] if count else b""
        self._counted[ordinal] = _Counted(count, last_key, len(keys), index.state.num_added, index.state.num_removed)
        return count

    def _keys_of(self, ordinal: int) -> Sequence[bytes]:
        record = self._tracker.of(ordinal)
        return () if record is None else record.keys

    def in_short(self, event: e.Event, sequence: int) -> e.Event:
        """An event as it is to be written, before it is folded: a lookup in short, where it is the last one once more.

        It is written in full every now and then, so that whoever lacks a part of the log soon knows it again.
        """
        if not isinstance(event, _LOOKUPS):
            return event
        ordinal = self._tracker.ordinal(event.request_id)
        last = self.state.pending.get(ordinal)
        if last is None or not _repeats(last, event, ordinal, sequence):
            return event
        if isinstance(event, e.LookupAnswered):
            return e.LookupAnsweredAgain(ordinal, event.cause)
        return e.LookupRequestedAgain(ordinal, event.time_ns)

    def in_full(self, event: e.Event) -> e.Event:
        """What was written in short, before or behind its fold; itself, if it repeats what is not known here.

        Readers of logs call it with each event, so that they need not know that a lookup may be short.
        """
        if not isinstance(event, e.RepeatedLookup):
            return event
        record, last = self._tracker.of(event.ordinal), self.state.pending.get(event.ordinal)
        if record is None or last is None:
            return event
        return event.after(last.as_event(record.request_id, record.ordinal, last.sequence))

    def lose(self) -> None:
        """Events are missing here, other answers perhaps among them: those from before are not what is repeated."""
        self.state.pending.clear()

    @on(e.RepeatedLookup)
    def _repeated(self, event: e.RepeatedLookup, sequence: int, _subject: Subject) -> None:
        full = self.in_full(event)
        if full is not event:
            self._fold(full, sequence)

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered, sequence: int, subject: Subject) -> None:
        record = subject.current
        if record is None:
            return
        ordinal = event.ordinal
        last = self.state.pending.get(ordinal)
        self.state.hits[ordinal] = CachedHit(
            event.num_hit_tokens // self._chunk_size,
            len(record.keys),
            event.generation,
            self._chunk_index.state.num_added,
            self._chunk_index.state.num_removed,
        )
        self.state.pending[ordinal] = PendingAnswer(
            event.generation,
            event.num_computed_tokens,
            event.num_tokens,
            event.num_hit_tokens,
            event.num_external_tokens,
            event.is_async,
            event.miss_reason,
            event.miss_cause,
            sequence,
            sequence if last is None or not _repeats(last, event, ordinal, sequence) else last.written_at,
        )
        self._end_row(ordinal)
        if event.miss_reason == _WINDOW:
            num_chunks = max(0, event.num_hit_tokens) // self._chunk_size
            self.state.junctions[ordinal] = num_chunks * self._chunk_size

    @on(e.LookupDeferred)
    def _deferred(self, event: e.LookupDeferred, _sequence: int, subject: Subject) -> None:
        if subject.current is None:
            return
        self.state.num_deferred[event.ordinal] = event.num_deferred
        self.state.deferred_for[event.ordinal] = event.job_id
        self.state.pending.pop(event.ordinal, None)

    @on(e.DecisionWithheld)
    def _withheld(self, event: e.DecisionWithheld, _sequence: int, _subject: Subject) -> None:
        self.state.pending.pop(self._tracker.ordinal(event.request_id), None)

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

    @on(e.BlocksAllocated)
    def _allocated(self, _event: e.BlocksAllocated, _sequence: int, subject: Subject) -> None:
        if subject.request is None:
            return
        ordinal = subject.request.ordinal
        answer = self.state.pending.pop(ordinal, None)
        if answer is None:
            self.state.taken_up.pop(ordinal, None)
        else:
            self.state.taken_up[ordinal] = answer

    @on(e.RequestPreempted, e.SessionContinued, e.RequestFinished, e.RequestArrived)
    def _forget(self, _event: e.RequestEvent, _sequence: int, subject: Subject) -> None:
        if subject.request is None:
            return
        ordinal = subject.request.ordinal
        self._counted.pop(ordinal, None)
        self.state.hits.pop(ordinal, None)
        self.state.pending.pop(ordinal, None)
        self.state.taken_up.pop(ordinal, None)
        self._end_row(ordinal)
        self.state.junctions.pop(ordinal, None)

    def _end_row(self, ordinal: int) -> None:
        self.state.num_deferred.pop(ordinal, None)
        self.state.deferred_for.pop(ordinal, None)

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset, _sequence: int, _subject: Subject) -> None:
        self._counted.clear()
        self.state.hits.clear()
        self.state.pending.clear()
        self.state.num_deferred.clear()
        self.state.deferred_for.clear()
        self.state.junctions.clear()
