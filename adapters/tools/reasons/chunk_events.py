"""Computes the history of each chunk, and of each preempted request's tail, from the events of all requests."""

from __future__ import annotations

from kvledger.adapters.tools.reasons.chunk_history import ChunkFact, ChunkStatus
from kvledger.adapters.tools.reasons.memory import Memory, Tail
from kvledger.lifecycle import events as e
from kvledger.lifecycle import on
from kvledger.lifecycle.reader import NEVER, num_intact_tokens


class ChunkEvents:
    """Part of `Accounts` that gets all events about chunks."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._model, self._moment = memory.model, memory.model.moment
        self._chunk_size = memory.model.configuration.chunk_size

    @on(e.ChunkKeysObserved)
    def _keys_observed(self, event: e.ChunkKeysObserved) -> None:
        life = self._moment.life
        ordinal = NEVER if life is None else life.ordinal
        self._memory.chunks.known(event.keys, self._moment.sequence, event.request_id, ordinal)

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished) -> None:
        """Forget keys of the finished request if it did not compute their chunks."""
        life = self._moment.life
        if life is not None:
            beyond = life.keys[max(0, num_intact_tokens(event)) // self._chunk_size :]
            self._memory.chunks.forget_known(beyond, event.request_id)

    @on(e.SaveIssued)
    def _save_issued(self, event: e.SaveIssued) -> None:
        save = self._model.copies.current
        if save is not None:
            self._memory.chunks.save_issued(save.keys, self._saving(event))

    @on(e.TailSaveIssued)
    def _tail_save_issued(self, event: e.TailSaveIssued) -> None:
        account = self._memory.decided(event)
        if account is not None:
            end_token = event.first_token + min(event.num_tokens, self._chunk_size)
            account.tail = Tail(event.first_token, end_token, self._saving(event))

    @on(e.SaveCompleted, e.SaveFailed)
    def _save_settled(self, event: e.SaveCompleted | e.SaveFailed) -> None:
        status, error = ChunkStatus.SAVED, ""
        if isinstance(event, e.SaveFailed):
            status, error = ChunkStatus.SAVE_FAILED, event.error
        save, sequence = self._model.copies.current, self._moment.sequence
        # A chunk that is saved after a reset stays lost to the reset.
        if save is not None and (status is ChunkStatus.SAVE_FAILED or save.epoch == self._model.copies.epoch):
            self._memory.chunks.save_settled(save.keys, event.job_id, status, sequence, event.cause, error)
        account = self._memory.decided(event)
        if account is not None and account.tail is not None and account.tail.fact.job_id == event.job_id:
            account.tail.fact = account.tail.fact.settled(status, sequence, event.cause, error)

    @on(e.SaveDeclined)
    def _save_declined(self, event: e.SaveDeclined) -> None:
        life = self._model.lives.of(event.ordinal)
        if life is None:
            return
        fact = ChunkFact(
            ChunkStatus.DECLINED,
            self._moment.sequence,
            event.request_id,
            event.ordinal,
            detail=event.reason,
            cause=event.cause,
        )
        first_token, mark = event.first_chunk * self._chunk_size, life.num_tokens_before_preemption
        if event.cause == life.preempted_at and first_token + self._chunk_size > mark:
            account = self._memory.account(life)
            if account is not None:
                account.tail = Tail(first_token, max(mark, first_token), fact)
            return
        self._memory.chunks.declined(life.keys[max(0, event.first_chunk) :], event.num_chunks, fact)

    @on(e.ChunksEvicted, e.ChunksTainted)
    def _left(self, event: e.ChunksEvicted | e.ChunksTainted) -> None:
        fact = ChunkFact(ChunkStatus.TAINTED, self._moment.sequence, cause=event.cause)
        if isinstance(event, e.ChunksEvicted):
            fact = ChunkFact(ChunkStatus.EVICTED, self._moment.sequence, event.request_id, cause=event.cause)
        for key in event.keys:
            self._memory.chunks.left(key, fact)

    @on(e.PrefillAdvanced, e.PrefillCompleted)
    def _progressed(self, event: e.PrefillAdvanced | e.PrefillCompleted) -> None:
        account = self._memory.decided(event)
        if account is not None:
            account.tail = None  # a step has used the tail

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        sequence = self._moment.sequence
        self._memory.chunks.reset(sequence)
        for account in self._memory.state.accounts.values():
            if account.tail is not None:
                earlier = account.tail.fact
                account.tail.fact = ChunkFact(ChunkStatus.RESET, sequence, cause=sequence, earlier=earlier)

    @on(e.PrefixCacheReset)
    def _spared(self, _event: e.PrefixCacheReset) -> None:
        self._memory.chunks.spared(self._moment.sequence)
        for account in self._memory.state.accounts.values():
            if account.tail is not None:
                account.tail.before_reset = self._moment.sequence

    def _saving(self, event: e.SaveIssued | e.TailSaveIssued) -> ChunkFact:
        sequence = self._moment.sequence
        return ChunkFact(ChunkStatus.SAVING, sequence, event.request_id, event.ordinal, event.job_id, cause=event.cause)
