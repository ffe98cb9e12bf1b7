"""RESET_EPOCH: what was cached before a reset is never offered again."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.moment import on
from kvledger.lifecycle.states import BlocksRegion, RequestState

_PREEMPTED = RequestState.PREEMPTED


class ResetEpoch(Checker):
    """After a reset the cache is empty, and only saves issued since then fill it.

    Verifies: every chunk of an answered hit was committed since the last reset, by a save that was issued since, and so
    was the tail it ends with; of what a request had computed at a reset nothing is saved until it begins anew, also not
    by a session's next turn.
    Does not verify: what survives a reset and is never offered; the local prefix cache of the engine; loads that were
    in flight during the reset.
    """

    rule = "RESET_EPOCH"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._reset_at = 0
        self._stale: dict[str, None] = {}
        """Requests that have held blocks since before the last reset, or lost them since."""
        self._seen: dict[str, tuple[int, int, bytes]] = {}
        """Request id -> (removals counted by the chunk index then, chunks found good, key of the last of them).

        A key hashes all before it, so an equal last key means equal keys: this spares the polls.
        """
        model.forgotten.at(LIFE, self._seen, self._stale)
        self._chunk_size = model.configuration.chunk_size

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        if self.jobs.epoch and event.num_hit_tokens:
            self._check_hit(event)

    @on(e.SaveIssued, e.TailSaveIssued)
    def _issued(self, event: e.SaveIssued | e.TailSaveIssued) -> None:
        if event.request_id in self._stale:
            detail = f"save {event.job_id} copies what was computed on top of KV from before the reset"
            self.broken(detail, self._reset_at, event.cause)

    @on(e.LookupRequested)
    def _begins_anew(self, event: e.LookupRequested) -> None:
        self._stale.pop(event.request_id, None)

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        if self.moment.state_before is _PREEMPTED:
            self._stale.pop(event.request_id, None)

    @on(e.TokensRolledBack)
    def _rolled_back(self, event: e.TokensRolledBack) -> None:
        if not event.num_computed_tokens:
            self._stale.pop(event.request_id, None)

    @on(e.CacheReset)
    def _begin_epoch(self, _event: e.CacheReset) -> None:
        self._reset_at = self.moment.sequence
        self._seen.clear()
        self._stale.clear()
        self._stale.update((life.request_id, None) for life in self.lives if life.blocks is not BlocksRegion.NONE)

    def _check_hit(self, event: e.LookupAnswered) -> None:
        num_chunks, of_tail = divmod(event.num_hit_tokens, self._chunk_size)
        tail = self.tails.saved(self.moment.life)
        if of_tail and (tail is None or tail.end_token != event.num_hit_tokens):
            detail = f"the hit of {event.num_hit_tokens} tokens counts a tail of {of_tail}, not saved since the reset"
            self.broken(detail, self._reset_at, event.cause)
            return
        num_removed = self.chunks.num_removed
        keys = [] if self.moment.life is None else self.moment.life.keys
        removed_then, num_seen, last_key = self._seen.get(event.request_id, (num_removed, 0, b""))
        is_as_seen = removed_then == num_removed and 0 < num_seen <= len(keys) and keys[num_seen - 1] == last_key
        first = num_seen if is_as_seen else 0
        for chunk, key in enumerate(keys[first:num_chunks], first):
            if key not in self.chunks and not self._left_since(key):
                detail = f"the hit of {event.num_hit_tokens} tokens counts chunk {chunk}, not saved since the reset"
                self.broken(detail, self._reset_at, event.cause)
                return
        if 0 < num_chunks <= len(keys):
            self._seen[event.request_id] = (num_removed, num_chunks, keys[num_chunks - 1])

    def _left_since(self, key: bytes) -> bool:
        """Whether the chunk was evicted or tainted after the reset; a load of it is LOADABLE_AFTER_COMMIT's."""
        departed = self.chunks.departed(key)
        return departed is not None and departed.sequence > self._reset_at
