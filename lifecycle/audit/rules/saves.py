"""Saves: what is saved, when, and that nothing is left out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.forgotten import LIFE
from kvledger.lifecycle.reader.moment import Visits, num_intact_tokens
from kvledger.lifecycle.reader.records import NEVER
from kvledger.lifecycle.states import BlocksRegion, RequestState


class ChunkComplete(Checker):
    """CHUNK_COMPLETE: only settled tokens are saved.

    Verifies: every saved chunk or tail ends within the settled tokens that were most recently recorded for its request
    by a step, a preemption or the request's end. At a request's end the last sampled token does not count, because it
    was never computed. A tail begins where a chunk begins, and has fewer tokens than a chunk.
    Does not verify: that the number of settled tokens is right (SETTLED_EXACT); the order of writes on the device.
    """

    rule = "CHUNK_COMPLETE"

    @on(e.SaveIssued)
    def _save_issued(self, event: e.SaveIssued) -> None:
        self._check(event, (max(event.chunks, default=-1) + 1) * self.layout.chunk_size)

    @on(e.TailSaveIssued)
    def _tail_save_issued(self, event: e.TailSaveIssued) -> None:
        tokens = range(event.first_token, event.first_token + event.num_tokens)
        if not tokens or tokens.start % self.layout.chunk_size or len(tokens) >= self.layout.chunk_size:
            detail = (
                f"save {event.job_id} copies tokens {tokens.start} to {tokens.stop}, "
                f"which are not the beginning of a chunk of {self.layout.chunk_size} tokens"
            )
            self.broken(detail, event.cause)
        self._check(event, tokens.stop)

    def _check(self, event: e.SaveIssued | e.TailSaveIssued, num_tokens: int) -> None:
        num_settled_tokens, sequence = (0, 0) if self.moment.life is None else self.moment.life.settled
        if num_tokens > num_settled_tokens:
            what = f"chunk {max(event.chunks)}" if isinstance(event, e.SaveIssued) else "the tail"
            detail = f"{what} ends at token {num_tokens}, but only {num_settled_tokens} tokens were settled"
            self.broken(detail, sequence, event.cause)


_AT_THE_BEGINNING = (0, 0)


class CursorLeFrontier(Checker):
    """CURSOR_LE_FRONTIER: a request's save cursor moves forward only over settled chunks.

    The save cursor is the first chunk that no step has recorded as settled yet. A step that records settled chunks of a
    request records them from the cursor on.

    Verifies: each step records settled chunks of a request from the cursor on, and the cursor is not beyond the settled
    tokens of that step. The checker computes the cursor itself. A preemption, a failed load of the present generation,
    a rollback, a session's next turn and a reset move the cursor back.
    Does not verify: that the chunks before the cursor were saved (STORE_CONTIGUOUS).
    """

    rule = "CURSOR_LE_FRONTIER"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._cursors: dict[str, tuple[int, int]] = {}
        """Request id → (chunks before the cursor, sequence number of the step that moved it)."""
        self._chunk_size = model.configuration.chunk_size
        model.forgotten.at((*LIFE, e.RequestPreempted, e.RequestFinished), self._cursors)

    def begin(self) -> None:
        """Mark the save cursor of each life as unknown. The next step that records settled chunks sets it."""
        self._cursors.update((life.request_id, (NEVER, 0)) for life in self.lives)

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        if event.settled:
            self._check_step(event)

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        self._cursors.clear()

    @on(e.LoadFailed)
    def _restart(self, event: e.LoadFailed) -> None:
        if self.lives.in_generation(event) is not None:
            self._cursors.pop(event.request_id, None)

    @on(e.SessionContinued, e.TokensRolledBack)
    def _cut(self, event: e.SessionContinued | e.TokensRolledBack) -> None:
        num_chunks, sequence = self._cursors.get(event.request_id, (0, 0))
        cut = event.num_computed_tokens // self._chunk_size
        if num_chunks > cut:
            self._cursors[event.request_id] = (cut, sequence)

    def _check_step(self, event: e.StepScheduled) -> None:
        cursors, life_of, chunk_size = self._cursors, self.lives.of, self._chunk_size
        is_any_loading, recorded_at = bool(self.copies.loads), self.moment.sequence
        for ordinal, first_chunk, num_settled_tokens, _ in event.settled:
            life = life_of(ordinal)
            if life is None:
                continue
            request_id = life.request_id
            num_chunks, sequence = cursors.get(request_id, _AT_THE_BEGINNING)
            end_chunk = num_settled_tokens // chunk_size
            if num_chunks not in {first_chunk, NEVER} or first_chunk > end_chunk:
                detail = (
                    f"the step records settled chunks from {first_chunk} on, but the cursor is at chunk {num_chunks} "
                    f"and {end_chunk} chunks are settled"
                )
                self.broken(detail, sequence, request_id=request_id)
            # Until a load has arrived, tokens computed on top of it may be wrong too.
            if not is_any_loading or life.blocks is not BlocksRegion.LOADING:
                cursors[request_id] = (end_chunk, recorded_at)


class _Accounted(msgspec.Struct, gc=False):
    """The chunks of one request that are accounted for: in the pool, being saved, or declined."""

    num_chunks: int = 0
    """Every chunk before this number is accounted for."""
    beyond: set[int] = msgspec.field(default_factory=set)
    end_chunk: int = 0
    """Number of settled chunks, as it was last recorded."""

    def add(self, chunk: int) -> None:
        if chunk == self.num_chunks:
            self.num_chunks += 1
            self._take_beyond()
        elif chunk > self.num_chunks:
            self.beyond.add(chunk)

    def add_all_before(self, chunk: int) -> None:
        """Add all chunks before this one, without a loop over them."""
        if chunk > self.num_chunks:
            self.num_chunks = chunk
            if self.beyond:
                self.beyond = {each for each in self.beyond if each >= chunk}
            self._take_beyond()

    def _take_beyond(self) -> None:
        while self.num_chunks in self.beyond:
            self.beyond.remove(self.num_chunks)
            self.num_chunks += 1


class StoreContiguous(Checker):
    """STORE_CONTIGUOUS: saves leave out no chunk, because a hit ends at the first chunk that is not stored.

    When a chunk of a request is saved, each chunk before it is in the pool, is being saved, or was declined.

    Verifies: this statement about each saved chunk, over the whole life of a request. A chunk counts as being in
    the pool if it was in the pool when a step, a preemption or the request's end recorded its tokens as settled, or
    if it is in the pool when a later chunk is saved. A chunk counts as declined if a reset or a quarantine
    prevented its save.
    Does not verify: that settled chunks are saved at all, which the state handlers decide; that chunks stay in the pool
    afterwards.
    """

    rule = "STORE_CONTIGUOUS"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._accounts: dict[str, _Accounted] = {}
        self._known: list[tuple[_Accounted, str, int, int]] = []
        """(account, request id, first chunk, end chunk) of chunks that the last observation recorded as settled, until
        they are accounted for."""
        self._chunk_size = model.configuration.chunk_size
        model.forgotten.at(LIFE, self._accounts)

    def begin(self) -> None:
        """Treat all chunks with known keys as accounted for, because their history is not known."""
        for life in self.lives:
            num_chunks = len(life.keys)
            self._accounts[life.request_id] = _Accounted(num_chunks, end_chunk=num_chunks)

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        if self._known:
            self._look()
        if event.settled:
            life_of, accounts = self.lives.of, self._accounts
            known, chunk_size = self._known, self._chunk_size
            for ordinal, first_chunk, num_settled_tokens, _ in event.settled:
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
            account.end_chunk = min(num_intact_tokens(event) // self._chunk_size, len(life.keys))
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

    @on(e.ChunksEvicted, e.ChunksTainted)
    def _evicted(self, event: e.ChunksEvicted | e.ChunksTainted) -> None:
        # A chunk that was not saved because it was in the pool stays accounted for.
        self._look(keeps_known=True, gone=frozenset(event.keys))

    @on(e.SaveFailed)
    def _save_failed(self, _event: e.SaveFailed) -> None:
        # A chunk that was not saved because another save of it was in flight stays accounted for, too.
        if self._known and self.copies.current is not None:
            self._look(keeps_known=True, gone=frozenset(self.copies.current.keys))

    @on(e.SaveDeclined)
    def _declined(self, event: e.SaveDeclined) -> None:
        account = self._account(event.request_id)
        num_keys = 0 if self.moment.life is None else len(self.moment.life.keys)
        # After the chunks with known keys there is at most a tail.
        end_chunk = max(account.end_chunk, min(event.first_chunk + event.num_chunks, num_keys + 1))
        for chunk in range(event.first_chunk, end_chunk):
            account.add(chunk)

    @on(e.SaveIssued)
    def _save_issued(self, event: e.SaveIssued) -> None:
        account, chunks = self._accounts.get(event.request_id), event.chunks
        if account is not None and chunks and chunks[0] == account.num_chunks and not account.beyond:
            end_chunk = account.num_chunks + len(chunks)
            if chunks[-1] == end_chunk - 1:  # consecutive, right after the last
                account.num_chunks = end_chunk
                return
        self._check_save(event)

    def _account(self, request_id: str) -> _Accounted:
        account = self._accounts.get(request_id)
        if account is None:
            account = self._accounts[request_id] = _Accounted()
        return account

    def _pass_over(self, account: _Accounted, first_chunk: int) -> None:
        """Account for settled chunks that are not saved, because of a quarantine or an earlier reset."""
        for chunk in range(max(first_chunk, account.num_chunks), account.end_chunk):
            account.add(chunk)

    def _look(
        self,
        *,
        is_reset: bool = False,
        keeps_known: bool = False,
        gone: frozenset[bytes] = frozenset(),
    ) -> None:
        """Account for the chunks in `_known` that are in the pool or being saved.

        Args:
            is_reset: whether to account for all chunks in `_known`.
            keeps_known: whether to keep `_known`; default: clear it.
            gone: keys of chunks that count as in the pool, although they have just left it.
        """
        known = self._known
        if not keeps_known:
            self._known = []
        for account, request_id, first_chunk, end_chunk in known:
            if account.num_chunks >= end_chunk:  # all were saved
                continue
            whose = self.lives.get(request_id)
            keys = () if whose is None else whose.keys
            first, end = max(first_chunk, account.num_chunks), min(end_chunk, len(keys))
            left_out = frozenset(() if is_reset else self.chunks.unsaved(keys, first, end))
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
        missing: Sequence[int] = [
            chunk
            for chunk in range(account.num_chunks, min(last_chunk, len(keys)))
            if chunk not in account.beyond and not self._is_there(keys[chunk])
        ]
        first_unknown = max(account.num_chunks, len(keys))
        num_unknown = last_chunk - first_unknown - sum(first_unknown <= chunk < last_chunk for chunk in account.beyond)
        if missing or num_unknown > 0:
            what = f"chunks {missing}" if missing else ""
            if num_unknown > 0:
                what += f"{' and ' if what else ''}{num_unknown} of the chunks {first_unknown} to {last_chunk - 1}"
            detail = f"chunk {last_chunk} is saved, but {what} before it were neither saved nor declined"
            self.broken(detail, event.cause)
        account.add_all_before(last_chunk)  # report it once

    def _is_there(self, key: bytes) -> bool:
        return key in self.chunks or key in self.chunks.saving


class _Taken(msgspec.Struct):
    """A request that lost its blocks, and its settled chunks that are neither being saved nor declined so far."""

    sequence: int
    request_id: str
    chunks: list[int]


class SettledSaved(Checker):
    """SETTLED_SAVED: settled chunks are saved at the latest when the request loses its blocks.

    Verifies: when a request is preempted or ends, each of its settled chunks is in the pool, is being saved, or is
    declined. At a request's end its last token does not count, because it was never computed. A request is not checked
    if it is quarantined, if a load for it is in flight, or if it has KV from before a reset.
    Does not verify: how much earlier a chunk is saved, which the state handlers decide; tails; chunks whose save was in
    flight during a reset (RESET_EPOCH); models with sliding windows, whose saves leave out chunks that no token sees
    any more.
    """

    rule = "SETTLED_SAVED"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._taken: _Taken | None = None
        """The last request that lost its blocks, until the next step, preemption or end. By then, all decisions about
        the request are recorded."""

    def visits(self) -> Visits:
        """Return pairs (event class, method). If a group has a window, return no pairs: the rule is not checked."""
        return [] if self.layout.has_windows else super().visits()

    @on(e.StepScheduled, e.RequestPreempted, e.RequestFinished)
    def _decided(self, _event: e.Event) -> None:
        taken, self._taken = self._taken, None
        if taken is not None and taken.chunks:
            detail = f"the request lost its blocks, but settled chunks {taken.chunks} were neither saved nor declined"
            self.broken(detail, taken.sequence, request_id=taken.request_id)

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted) -> None:
        if self.moment.blocks_before is not BlocksRegion.LOADING and self.moment.state_before is not RequestState.NEW:
            self._take(num_intact_tokens(event))

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished) -> None:
        life = self.moment.life
        if life is not None and not self.copies.is_loading(life.ordinal, life.generation, outside_steps=True):
            num_computed_tokens = self.lives.num_computed_tokens(life)
            self._take(min(num_intact_tokens(event), event.num_tokens - 1, num_computed_tokens))

    def _take(self, num_settled_tokens: int) -> None:
        life = self.moment.life
        if life is None or not self.moment.is_legal or life.quarantined or self.moment.was_stale:
            return
        end_chunk = min(num_settled_tokens // self.layout.chunk_size, len(life.keys))
        unsaved = self.chunks.unsaved(life.keys, 0, end_chunk)
        chunks = [chunk for chunk in unsaved if life.keys[chunk] not in self.chunks.late]
        if chunks:
            self._taken = _Taken(self.moment.sequence, life.request_id, chunks)

    @on(e.SaveIssued)
    def _issued(self, event: e.SaveIssued) -> None:
        taken = self._taken
        if taken is not None and event.cause == taken.sequence:
            issued = frozenset(event.chunks)
            taken.chunks = [chunk for chunk in taken.chunks if chunk not in issued]

    @on(e.SaveDeclined)
    def _declined(self, event: e.SaveDeclined) -> None:
        taken = self._taken
        if taken is not None and event.cause == taken.sequence:
            taken.chunks = [chunk for chunk in taken.chunks if chunk < event.first_chunk]

    @on(e.RequestQuarantined)
    def _quarantined(self, event: e.RequestQuarantined) -> None:
        if self._taken is not None and event.request_id == self._taken.request_id:
            self._taken = None
