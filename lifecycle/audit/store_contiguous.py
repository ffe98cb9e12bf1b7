"""STORE_CONTIGUOUS: what is saved leaves no hole, for nobody ever gets behind one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import ClassVar

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.replay import Check, ReplayedEvent
from kvledger.lifecycle.states import CurrentRegion, TrustRegion


class _Accounted(msgspec.Struct, gc=False):
    """Chunks of one request of which the log tells what became of them."""

    num_chunks: int = 0
    """All of these, from the first on."""
    beyond: set[int] = msgspec.field(default_factory=set)
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
        self._told: list[tuple[_Accounted, str, int, int]] = []
        """(request, its id, first, end) of chunks that the last observation told of, until their fate is known."""
        self._chunk_size = 0

    def begin(self, projections: Projections) -> None:
        """Nothing tells what became of the chunks known by now: all count as told of."""
        for record in projections.tracker:
            num_chunks = len(projections.chunk_keys.of(record.request_id))
            self._lives[record.request_id] = _Accounted(num_chunks, end_chunk=num_chunks)

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._chunk_size = model.configuration.chunk_size
        model.forgotten.at(LIFE, self._lives)
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
        ]

    def _step_scheduled(self, event: e.StepScheduled, _step: ReplayedEvent, projections: Projections) -> None:
        if self._told:
            self._look(projections)
        if event.settled:
            record_of, lives, keys_of = projections.tracker.of, self._lives, projections.chunk_keys.of
            told, chunk_size = self._told, self._chunk_size
            for ordinal, first_chunk, num_settled_tokens in event.settled:
                record = record_of(ordinal)
                if record is None:
                    continue
                request_id = record.request_id
                life = lives.get(request_id)
                if life is None:
                    life = lives[request_id] = _Accounted()
                end_chunk, num_keys = num_settled_tokens // chunk_size, len(keys_of(request_id))
                if end_chunk > num_keys:  # noqa: PLR1730 -- for every chunk that fills; a call of min costs more
                    end_chunk = num_keys
                life.end_chunk = end_chunk
                if record.trust is TrustRegion.QUARANTINED or record.current is CurrentRegion.STALE:
                    self._pass_over(life, first_chunk)
                elif end_chunk > life.num_chunks:
                    told.append((life, request_id, first_chunk, end_chunk))

    def _stopped(
        self, event: e.RequestPreempted | e.RequestFinished, step: ReplayedEvent, projections: Projections
    ) -> None:
        if self._told:
            self._look(projections)
        record = step.record
        if record is not None:
            life = self._life(event.request_id)
            num_keys = len(projections.chunk_keys.of(event.request_id))
            life.end_chunk = min(event.num_settled_tokens // self._chunk_size, num_keys)
            was_stale = step.states_before is not None and CurrentRegion.STALE in step.states_before
            if record.trust is TrustRegion.QUARANTINED or was_stale:
                self._pass_over(life, 0)
            elif life.end_chunk > life.num_chunks:
                self._told.append((life, event.request_id, 0, life.end_chunk))

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
        life = self._life(event.request_id)
        for chunk in range(event.first_chunk, max(life.end_chunk, event.first_chunk + event.num_chunks)):
            life.add(chunk)

    def _save_issued(
        self, event: e.SaveIssued, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        life, chunks = self._lives.get(event.request_id), event.chunks
        if life is not None and chunks and chunks[0] == life.num_chunks and not life.beyond:
            end_chunk = life.num_chunks + len(chunks)
            if chunks[-1] == end_chunk - 1:  # one after the other, right behind the last
                life.num_chunks = end_chunk
                return None
        return self._check_save(event, step, projections)

    def _life(self, request_id: str) -> _Accounted:
        life = self._lives.get(request_id)
        if life is None:
            life = self._lives[request_id] = _Accounted()
        return life

    def _pass_over(self, life: _Accounted, first_chunk: int) -> None:
        """From before a reset, or quarantined: the log says why nothing of it is saved."""
        for chunk in range(max(first_chunk, life.num_chunks), life.end_chunk):
            life.add(chunk)

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
            self._told = []
        for life, request_id, first_chunk, end_chunk in told:
            if life.num_chunks >= end_chunk:  # all of it was saved
                continue
            keys = projections.chunk_keys.of(request_id)
            first, end = max(first_chunk, life.num_chunks), min(end_chunk, len(keys))
            left_out = () if is_reset else projections.chunks.unsaved(keys, first, end)
            if not left_out and first == life.num_chunks < end and not life.beyond:
                life.num_chunks = end
                continue
            for chunk in range(first, end):
                if chunk not in left_out or keys[chunk] in gone:
                    life.add(chunk)

    def _cut(self, event: e.ChunkKeysObserved, _step: ReplayedEvent, _projections: Projections) -> None:
        life, first_chunk = self._lives.get(event.request_id), event.first_chunk
        if life is not None and (
            first_chunk < life.num_chunks
            or first_chunk < life.end_chunk
            or (life.beyond and first_chunk < max(life.beyond))
        ):
            life.num_chunks = min(life.num_chunks, first_chunk)
            life.beyond = {chunk for chunk in life.beyond if chunk < first_chunk}
            life.end_chunk = first_chunk

    def _check_save(self, event: e.SaveIssued, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        life = self._life(event.request_id)
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
