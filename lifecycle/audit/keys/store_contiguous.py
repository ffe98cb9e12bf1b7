"""STORE_CONTIGUOUS: what is saved leaves no hole, for nobody ever gets behind one."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.moment import on
from kvledger.lifecycle.audit.model.start import Start


class _Accounted(msgspec.Struct, gc=False):
    """Chunks of one request of which the log tells what became of them."""

    num_chunks: int = 0
    """All of these, from the first on."""
    beyond: set[int] = msgspec.field(default_factory=set)
    end_chunk: int = 0
    """Where the settled chunks ended when they were last recorded."""

    def add(self, chunk: int) -> None:
        if chunk == self.num_chunks:
            self.num_chunks += 1
            while self.num_chunks in self.beyond:
                self.beyond.remove(self.num_chunks)
                self.num_chunks += 1
        elif chunk > self.num_chunks:
            self.beyond.add(chunk)


class StoreContiguous(Checker):
    """Before a chunk of a request is saved, each chunk before it was in the pool, being saved, or declined.

    Verifies: this for every save, over a request's life; a chunk counts as there if it was when its tokens
    were settled, lost or final, or is there when the later one is saved, and as declined where a reset or a quarantine
    kept it from being saved.
    Does not verify: that what has settled is saved at all, which is the state handlers' business; what became of a
    chunk since it was there.
    """

    rule = "STORE_CONTIGUOUS"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._accounts: dict[str, _Accounted] = {}
        self._known: list[tuple[_Accounted, str, int, int]] = []
        """(request, its id, first, end) of chunks that the last observation named, until their fate is known."""
        self._chunk_size = model.configuration.chunk_size
        model.forgotten.at(LIFE, self._accounts)

    def begin(self, start: Start) -> None:
        """What became of the chunks known by now is not recorded: all count as named."""
        for life in start.lives:
            num_chunks = len(life.keys)
            self._accounts[life.request_id] = _Accounted(num_chunks, end_chunk=num_chunks)

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        if self._known:
            self._look()
        if event.settled:
            life_of, accounts = self.lives.of, self._accounts
            known, chunk_size = self._known, self._chunk_size
            for ordinal, first_chunk, num_settled_tokens in event.settled:
                life = life_of(ordinal)
                if life is None:
                    continue
                request_id = life.request_id
                account = accounts.get(request_id)
                if account is None:
                    account = accounts[request_id] = _Accounted()
                end_chunk, num_keys = num_settled_tokens // chunk_size, len(life.keys)
                if end_chunk > num_keys:  # noqa: PLR1730 -- for every chunk that fills; a call of min costs more
                    end_chunk = num_keys
                account.end_chunk = end_chunk
                if life.quarantined or life.is_stale:
                    self._pass_over(account, first_chunk)
                elif end_chunk > account.num_chunks:
                    known.append((account, request_id, first_chunk, end_chunk))

    @on(e.RequestPreempted, e.RequestFinished)
    def _stopped(self, event: e.RequestPreempted | e.RequestFinished) -> None:
        if self._known:
            self._look()
        life = self.moment.life
        if life is not None:
            account = self._account(event.request_id)
            account.end_chunk = min(event.num_intact_tokens // self._chunk_size, len(life.keys))
            if life.quarantined or self.moment.was_stale:
                self._pass_over(account, 0)
            elif account.end_chunk > account.num_chunks:
                self._known.append((account, event.request_id, 0, account.end_chunk))

    @on(e.TransferReported)
    def _reported(self, _event: e.TransferReported) -> None:
        if self._known:
            self._look()

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        self._look(is_reset=True)

    @on(e.ChunkEvicted, e.ChunkTainted)
    def _evicted(self, event: e.ChunkEvicted | e.ChunkTainted) -> None:
        # Who was passed over because it was there still counts as that.
        self._look(keeps_known=True, gone=(event.key,))

    @on(e.SaveFailed)
    def _save_failed(self, _event: e.SaveFailed) -> None:
        # The same for who was passed over because another one's save was under way.
        if self._known and self.jobs.current is not None:
            self._look(keeps_known=True, gone=self.jobs.current.keys)

    @on(e.SaveDeclined)
    def _declined(self, event: e.SaveDeclined) -> None:
        account = self._account(event.request_id)
        for chunk in range(event.first_chunk, max(account.end_chunk, event.first_chunk + event.num_chunks)):
            account.add(chunk)

    @on(e.SaveIssued)
    def _save_issued(self, event: e.SaveIssued) -> None:
        account, chunks = self._accounts.get(event.request_id), event.chunks
        if account is not None and chunks and chunks[0] == account.num_chunks and not account.beyond:
            end_chunk = account.num_chunks + len(chunks)
            if chunks[-1] == end_chunk - 1:  # one after the other, right behind the last
                account.num_chunks = end_chunk
                return
        self._check_save(event)

    def _account(self, request_id: str) -> _Accounted:
        account = self._accounts.get(request_id)
        if account is None:
            account = self._accounts[request_id] = _Accounted()
        return account

    def _pass_over(self, account: _Accounted, first_chunk: int) -> None:
        """From before a reset, or quarantined: the log says why nothing of it is saved."""
        for chunk in range(max(first_chunk, account.num_chunks), account.end_chunk):
            account.add(chunk)

    def _look(
        self,
        *,
        is_reset: bool = False,
        keeps_known: bool = False,
        gone: Collection[bytes] = (),
    ) -> None:
        """Account for the chunks that are there, and no more are named."""
        known = self._known
        if not keeps_known:
            self._known = []
        for account, request_id, first_chunk, end_chunk in known:
            if account.num_chunks >= end_chunk:  # all of it was saved
                continue
            whose = self.lives.get(request_id)
            keys = () if whose is None else whose.keys
            first, end = max(first_chunk, account.num_chunks), min(end_chunk, len(keys))
            left_out = () if is_reset else self.chunks.unsaved(keys, first, end)
            if not left_out and first == account.num_chunks < end and not account.beyond:
                account.num_chunks = end
                continue
            for chunk in range(first, end):
                if chunk not in left_out or keys[chunk] in gone:
                    account.add(chunk)

    @on(e.ChunkKeysObserved)
    def _cut(self, event: e.ChunkKeysObserved) -> None:
        account, first_chunk = self._accounts.get(event.request_id), event.first_chunk
        if account is not None and (
            first_chunk < account.num_chunks
            or first_chunk < account.end_chunk
            or (account.beyond and first_chunk < max(account.beyond))
        ):
            account.num_chunks = min(account.num_chunks, first_chunk)
            account.beyond = {chunk for chunk in account.beyond if chunk < first_chunk}
            account.end_chunk = first_chunk

    def _check_save(self, event: e.SaveIssued) -> None:
        account = self._account(event.request_id)
        keys = () if self.moment.life is None else self.moment.life.keys
        for chunk in event.chunks:
            account.add(chunk)
        last_chunk = max(event.chunks, default=0)
        missing = [
            chunk
            for chunk in range(account.num_chunks, last_chunk)
            if chunk not in account.beyond and not (chunk < len(keys) and self._is_there(keys[chunk]))
        ]
        if missing:
            detail = f"chunk {last_chunk} is saved, but chunks {missing} before it were left out without a word"
            self.broken(detail, event.cause)
        for chunk in range(account.num_chunks, last_chunk):
            account.add(chunk)  # counted once

    def _is_there(self, key: bytes) -> bool:
        return key in self.chunks or key in self.chunks.saving
