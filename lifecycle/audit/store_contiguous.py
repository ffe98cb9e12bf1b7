"""STORE_CONTIGUOUS: what is saved leaves no hole, for nobody ever gets behind one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import ClassVar

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.indices import Indices
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import Check, ReplayedEvent


@attrs.define
class _Accounted:
    """Chunks of one request of which the log tells what became of them."""

    num_chunks: int = 0
    """All of these, from the first on."""
    beyond: set[int] = attrs.field(factory=set)
    end_chunk: int = 0
    """Where the settled chunks ended when they were last told of."""

    def add(self, chunk: int) -> None:
        if chunk == self.num_chunks:
            self.num_chunks += 1
            while self.num_chunks in self.beyond:
                self.beyond.remove(self.num_chunks)
                self.num_chunks += 1
        elif chunk > self.num_chunks:
            self.beyond.add(chunk)


class StoreContiguous:
    """Before a chunk of a request is saved, each chunk before it was in the pool, being saved, or declined.

    Verifies: this for every save, over a request's life; a chunk counts as there if it was when its tokens were told to
    be settled, lost or final, or is there when the later one is saved, and as declined where a reset or a quarantine
    kept it from being saved.
    Does not verify: that what has settled is saved at all, which is the state handlers' business; what became of a
    chunk since it was there.
    """

    rule: ClassVar[str] = "STORE_CONTIGUOUS"

    def __init__(self) -> None:
        self._lives: dict[str, _Accounted] = {}
        self._told: dict[str, tuple[int, int]] = {}
        """Request id -> (first, end) of chunks that the last observation told of, until what they became is known."""

    def begin(self, projections: Projections) -> None:
        """Nothing tells what became of the chunks known by now: all count as told of."""
        for record in projections.tracker:
            num_chunks = len(projections.chunk_keys.of(record.request_id))
            self._lives[record.request_id] = _Accounted(num_chunks, end_chunk=num_chunks)

    def checks(self, _indices: Indices) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        return [
            (e.StepScheduled, self._step_scheduled),
            (e.SaveIssued, self._save_issued),
            (e.ChunkEvicted, self._evicted),
            (e.ChunkTainted, self._evicted),
            (e.SaveFailed, self._save_failed),
            (e.SaveDeclined, self._declined),
            (e.RequestPreempted, self._stopped),
            (e.RequestFinished, self._stopped),
            (e.TransferReported, self._reported),
            (e.CacheReset, self._reset),
            (e.ChunkKeysObserved, self._cut),
            (e.RequestArrived, self._forget),
            (e.RequestReleased, self._forget),
        ]

    def _step_scheduled(self, event: e.StepScheduled, _step: ReplayedEvent, projections: Projections) -> None:
        if self._told:
            self._look(projections)
        for ordinal, first_chunk, num_settled_tokens in event.settled:
            record = projections.tracker.by_ordinal(ordinal)
            if record is not None:
                is_doubtful = record.quarantined or record.stale_generation == record.generation
                self._settle(record.request_id, first_chunk, num_settled_tokens, projections, is_doubtful=is_doubtful)

    def _stopped(
        self, event: e.RequestPreempted | e.RequestFinished, step: ReplayedEvent, projections: Projections
    ) -> None:
        if self._told:
            self._look(projections)
        record = step.record
        if record is not None:
            generation = record.generation - isinstance(event, e.RequestPreempted)
            is_doubtful = record.quarantined or record.stale_generation == generation
            self._settle(event.request_id, 0, event.num_settled_tokens, projections, is_doubtful=is_doubtful)

    def _reported(self, _event: e.TransferReported, _step: ReplayedEvent, projections: Projections) -> None:
        if self._told:
            self._look(projections)

    def _reset(self, _event: e.CacheReset, _step: ReplayedEvent, projections: Projections) -> None:
        self._look(projections, is_reset=True)

    def _evicted(self, event: e.ChunkEvicted | e.ChunkTainted, _step: ReplayedEvent, projections: Projections) -> None:
        # Who was passed over because it was there still counts as that.
        self._look(projections, keeps_told=True, gone=(event.key,))

    def _save_failed(self, _event: e.SaveFailed, step: ReplayedEvent, projections: Projections) -> None:
        # The same for who was passed over because another one's save was under way.
        if self._told and step.job is not None:
            self._look(projections, keeps_told=True, gone=step.job.keys)

    def _declined(self, event: e.SaveDeclined, _step: ReplayedEvent, _projections: Projections) -> None:
        life = self._lives.setdefault(event.request_id, _Accounted())
        for chunk in range(event.first_chunk, max(life.end_chunk, event.first_chunk + event.num_chunks)):
            life.add(chunk)

    def _forget(self, event: e.RequestEvent, _step: ReplayedEvent, _projections: Projections) -> None:
        self._lives.pop(event.request_id, None)

    def _save_issued(
        self, event: e.SaveIssued, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        life = self._lives.get(event.request_id)
        if life is not None and event.chunks and event.chunks[0] == life.num_chunks and not life.beyond:
            num_chunks = len(event.chunks)
            if event.chunks[-1] == life.num_chunks + num_chunks - 1:  # one after the other, right behind the last
                life.num_chunks += num_chunks
                return None
        return self._check_save(event, step, projections)

    def _settle(
        self,
        request_id: str,
        first_chunk: int,
        num_settled_tokens: int,
        projections: Projections,
        *,
        is_doubtful: bool,
    ) -> None:
        life = self._lives.setdefault(request_id, _Accounted())
        num_keys = len(projections.chunk_keys.of(request_id))
        life.end_chunk = min(num_settled_tokens // projections.configuration.chunk_size, num_keys)
        if is_doubtful:  # from before a reset, or quarantined: the log says why nothing of it is saved
            for chunk in range(max(first_chunk, life.num_chunks), life.end_chunk):
                life.add(chunk)
        elif life.end_chunk > life.num_chunks:
            self._told[request_id] = (first_chunk, life.end_chunk)

    def _look(
        self,
        projections: Projections,
        *,
        is_reset: bool = False,
        keeps_told: bool = False,
        gone: Collection[bytes] = (),
    ) -> None:
        """Account for the chunks that are there, and no more are told of."""
        told = self._told
        if not keeps_told:
            self._told = {}
        for request_id, (first_chunk, end_chunk) in told.items():
            life = self._lives.get(request_id)
            if life is None or life.num_chunks >= end_chunk:
                continue
            keys = projections.chunk_keys.of(request_id)
            for chunk in range(max(first_chunk, life.num_chunks), min(end_chunk, len(keys))):
                if is_reset or keys[chunk] in gone or _is_there(keys[chunk], projections):
                    life.add(chunk)

    def _cut(self, event: e.ChunkKeysObserved, _step: ReplayedEvent, _projections: Projections) -> None:
        life, first_chunk = self._lives.get(event.request_id), event.first_chunk
        if life is not None and first_chunk < max(life.num_chunks, life.end_chunk, *life.beyond, 0):
            beyond = {chunk for chunk in life.beyond if chunk < first_chunk}
            self._lives[event.request_id] = _Accounted(min(life.num_chunks, first_chunk), beyond, first_chunk)

    def _check_save(self, event: e.SaveIssued, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        life = self._lives.setdefault(event.request_id, _Accounted())
        keys = projections.chunk_keys.of(event.request_id)
        for chunk in event.chunks:
            life.add(chunk)
        last_chunk = max(event.chunks, default=0)
        missing = [
            chunk
            for chunk in range(life.num_chunks, last_chunk)
            if chunk not in life.beyond and not (chunk < len(keys) and _is_there(keys[chunk], projections))
        ]
        if missing:
            detail = f"chunk {last_chunk} is saved, but chunks {missing} before it were left out without a word"
            yield violation(self.rule, step, projections, detail, event.cause)
        for chunk in range(life.num_chunks, last_chunk):
            life.add(chunk)  # told once


def _is_there(key: bytes, projections: Projections) -> bool:
    return projections.chunks.get(key) is not None or projections.chunks.is_saving(key)
