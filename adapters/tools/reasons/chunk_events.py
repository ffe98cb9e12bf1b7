"""From the events of all requests to the history of chunks, and to that of a preempted request's tail."""

from __future__ import annotations

from kvledger.adapters.tools.reasons.chunk_history import ChunkFact, ChunkHistory, ChunkStatus
from kvledger.adapters.tools.reasons.life import Life, Tail
from kvledger.adapters.tools.reasons.lives import Lives
from kvledger.lifecycle import Projection, on
from kvledger.lifecycle import events as e


class ChunkEvents(Projection):
    """Folds all events about chunks."""

    def __init__(self, chunk_size: int, lives: Lives, chunks: ChunkHistory) -> None:
        self._chunk_size = chunk_size
        self._lives = lives
        self._chunks = chunks

    def end_unsettled(self, life: Life, num_settled_tokens: int) -> None:
        """A request ends: of the chunks that it did not compute, nobody need know."""
        size = self._chunk_size
        beyond = (key for chunk, key in life.keys.items() if (chunk + 1) * size > num_settled_tokens)
        self._chunks.forget_known(beyond, life.request_id)

    @on(e.ChunkKeysObserved)
    def _keys_observed(self, event: e.ChunkKeysObserved, sequence: int) -> None:
        life = self._lives.any(event.request_id)
        life.cut_keys(event.first_chunk)
        life.keys.update(enumerate(event.keys, event.first_chunk))
        self._chunks.known(event.keys, sequence, event.request_id, life.ordinal)

    @on(e.SaveIssued)
    def _save_issued(self, event: e.SaveIssued, sequence: int) -> None:
        life = self._lives.any(event.request_id)
        keys = (life.keys[chunk] for chunk in event.chunks if chunk in life.keys)
        self._chunks.save_issued(keys, _saving(event, sequence, life))

    @on(e.TailSaveIssued)
    def _tail_save_issued(self, event: e.TailSaveIssued, sequence: int) -> None:
        life = self._lives.kept(event.request_id)
        if life is not None:
            fact = _saving(event, sequence, life)
            life.tail = Tail(event.first_token, event.first_token + min(event.num_tokens, self._chunk_size), fact)

    @on(e.SaveCompleted)
    def _save_completed(self, event: e.SaveCompleted, sequence: int) -> None:
        self._chunks.save_settled(event.job_id, sequence, event.cause, None)
        self._settle_tail(event, sequence, ChunkStatus.SAVED, "")

    @on(e.SaveFailed)
    def _save_failed(self, event: e.SaveFailed, sequence: int) -> None:
        self._chunks.save_settled(event.job_id, sequence, event.cause, event.error)
        self._settle_tail(event, sequence, ChunkStatus.SAVE_FAILED, event.error)

    def _settle_tail(
        self, event: e.SaveCompleted | e.SaveFailed, sequence: int, status: ChunkStatus, error: str
    ) -> None:
        life = self._lives.get(event.request_id)
        if life is not None and life.tail is not None and life.tail.fact.job_id == event.job_id:
            life.tail.fact = life.tail.fact.settled(status, sequence, event.cause, error)

    @on(e.SaveDeclined)
    def _save_declined(self, event: e.SaveDeclined, sequence: int) -> None:
        life = self._lives.any(event.request_id)
        fact = ChunkFact(
            ChunkStatus.DECLINED, sequence, event.request_id, life.ordinal, detail=event.reason, cause=event.cause
        )
        first_token = event.first_chunk * self._chunk_size
        if event.cause == life.preempted and first_token + self._chunk_size > life.mark:
            life.tail = Tail(first_token, max(life.mark, first_token), fact)
            return
        keys = (life.keys[chunk] for chunk in sorted(life.keys) if chunk >= event.first_chunk)
        self._chunks.declined(keys, event.num_chunks, fact)

    @on(e.ChunksEvicted)
    def _evicted(self, event: e.ChunksEvicted, sequence: int) -> None:
        fact = ChunkFact(ChunkStatus.EVICTED, sequence, event.request_id, cause=event.cause)
        for key in event.keys:
            self._chunks.left(key, fact)

    @on(e.ChunksTainted)
    def _tainted(self, event: e.ChunksTainted, sequence: int) -> None:
        fact = ChunkFact(ChunkStatus.TAINTED, sequence, cause=event.cause)
        for key in event.keys:
            self._chunks.left(key, fact)

    @on(e.PrefillAdvanced, e.PrefillCompleted)
    def _progressed(self, event: e.PrefillAdvanced | e.PrefillCompleted, _sequence: int) -> None:
        life = self._lives.get(event.request_id)
        if life is not None and life.tail is not None:
            life.tail = None  # it has been used

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset, sequence: int) -> None:
        self._chunks.reset(sequence)
        for life in self._lives:
            if life.is_computing or life.admission is not None:
                life.reset = sequence
            if life.tail is not None:
                life.tail.fact = ChunkFact(ChunkStatus.RESET, sequence, cause=sequence, earlier=life.tail.fact)

    @on(e.PrefixCacheReset)
    def _spared(self, _event: e.PrefixCacheReset, sequence: int) -> None:
        self._chunks.spared(sequence)
        for life in self._lives:
            if life.tail is not None:
                life.tail.before_reset = sequence


def _saving(event: e.SaveIssued | e.TailSaveIssued, sequence: int, life: Life) -> ChunkFact:
    return ChunkFact(ChunkStatus.SAVING, sequence, event.request_id, life.ordinal, event.job_id, cause=event.cause)
