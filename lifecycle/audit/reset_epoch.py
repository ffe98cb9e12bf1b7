"""RESET_EPOCH: what was cached before a reset is never offered again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.committed_chunks import CHUNK_EVENTS, CommittedChunks
from kvledger.lifecycle.audit.saved_tails import TAIL_EVENTS, SavedTails
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.projections.transfers import Job
from kvledger.lifecycle.replay import ReplayedEvent
from kvledger.lifecycle.states import RequestState


class ResetEpoch:
    """After a reset the cache is empty, and only saves issued since then fill it.

    Verifies: no chunk and no tail survives a reset; a save issued before a reset and completed after it commits
    nothing; every chunk of an answered hit was committed since the last reset, and so was the tail it ends with; of
    what a request had computed at a reset nothing is saved until it begins anew, also not by a session's next turn.
    Does not verify: the local prefix cache of the engine, and loads that were in flight during the reset.
    """

    rule: ClassVar[str] = "RESET_EPOCH"
    looks_at: ClassVar[frozenset[type[e.Event]]] = frozenset(
        {
            *CHUNK_EVENTS,
            *TAIL_EVENTS,
            e.LookupRequested,
            e.LookupAnswered,
            e.ChunkKeysObserved,
            e.BlocksAllocated,
            e.TokensRolledBack,
        }
    )

    def __init__(self) -> None:
        self._reset_at = 0
        self._committed = CommittedChunks()
        self._tails = SavedTails()
        self._saves: dict[int, tuple[Job, int]] = {}
        self._stale: set[str] = set()
        """Requests that have held blocks since before the last reset, or lost them since."""
        self._seen: dict[str, tuple[int, int]] = {}
        """Request id -> (removals counted by the chunk index then, chunks found good): spares the polls."""

    def check(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Compare with what was committed since the last reset."""
        event = step.event
        if self._reset_at or isinstance(event, e.CacheReset):  # until the first one, nothing can be stale
            self._committed.fold(event, projections)
            self._tails.fold(event, step.sequence)
        if self._stale:
            yield from self._check_stale(step, projections)
        if isinstance(event, e.LookupAnswered):
            if self._committed.epoch and event.num_hit_tokens:
                yield from self._check_hit(event, step, projections)
        elif isinstance(event, e.SaveIssued | e.TailSaveIssued | e.SaveCompleted | e.SaveFailed):
            yield from self._follow_save(event, step, projections)
        elif isinstance(event, e.CacheReset):
            yield from self._check_reset(step, projections)
        elif isinstance(event, e.ChunkKeysObserved | e.RequestArrived | e.RequestReleased):
            self._seen.pop(event.request_id, None)

    def _follow_save(
        self,
        event: e.SaveIssued | e.TailSaveIssued | e.SaveCompleted | e.SaveFailed,
        step: ReplayedEvent,
        projections: Projections,
    ) -> Iterator[Violation]:
        if isinstance(event, e.SaveIssued | e.TailSaveIssued):
            issued = projections.transfers.get(event.job_id)
            if issued is not None:
                self._saves[event.job_id] = (issued, self._committed.epoch)
            return
        job, epoch = self._saves.pop(event.job_id, (None, 0))
        if job is not None and epoch != self._committed.epoch:
            yield from self._check_late_save(job, step, projections)

    def _check_reset(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        self._reset_at = step.sequence
        self._seen.clear()
        self._stale = {record.request_id for record in projections.tracker if record.holds_blocks}
        if len(projections.chunks):
            yield violation(self.rule, step, projections, f"{len(projections.chunks)} chunks survived the reset")
        if len(projections.tails):
            yield violation(self.rule, step, projections, f"{len(projections.tails)} tails survived the reset")

    def _check_stale(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        event = step.event
        if isinstance(event, e.SaveIssued | e.TailSaveIssued):
            if event.request_id in self._stale:
                detail = f"save {event.job_id} copies what was computed on top of KV from before the reset"
                yield violation(self.rule, step, projections, detail, self._reset_at, event.cause)
        elif isinstance(event, e.BlocksAllocated):
            if step.state_before is RequestState.PREEMPTED:
                self._stale.discard(event.request_id)
        elif isinstance(event, e.TokensRolledBack):
            if not event.num_computed_tokens:
                self._stale.discard(event.request_id)
        elif isinstance(event, e.LookupRequested | e.RequestArrived | e.RequestReleased):
            self._stale.discard(event.request_id)

    def _check_late_save(self, job: Job, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        tail = projections.tails.saved(job.ordinal)
        if tail is not None and tail.job_id == job.job_id:
            detail = f"job {job.job_id} was issued before the reset, and its tail can be loaded after it"
            yield violation(self.rule, step, projections, detail, self._reset_at)
        stale = [key for key in job.keys if key not in self._committed and projections.chunks.get(key) is not None]
        if stale:
            detail = f"job {job.job_id} was issued before the reset, and committed {len(stale)} chunks after it"
            yield violation(self.rule, step, projections, detail, self._reset_at)

    def _check_hit(self, event: e.LookupAnswered, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        num_chunks, of_tail = divmod(event.num_hit_tokens, projections.configuration.chunk_size)
        tail = self._tails.saved(event.request_id)
        if of_tail and (tail is None or tail.end_token != event.num_hit_tokens):
            detail = f"the hit of {event.num_hit_tokens} tokens counts a tail of {of_tail}, not saved since the reset"
            yield violation(self.rule, step, projections, detail, self._reset_at, event.cause)
            return
        num_removed = projections.chunks.num_removed
        removed_then, num_seen = self._seen.get(event.request_id, (num_removed, 0))
        first = num_seen if removed_then == num_removed else 0
        keys = projections.chunk_keys.of(event.request_id)[first:num_chunks]
        for chunk, key in enumerate(keys, first):
            if key not in self._committed and not self._left_since(key, projections):
                detail = f"the hit of {event.num_hit_tokens} tokens counts chunk {chunk}, not saved since the reset"
                yield violation(self.rule, step, projections, detail, self._reset_at, event.cause)
                return
        self._seen[event.request_id] = (num_removed, num_chunks)

    def _left_since(self, key: bytes, projections: Projections) -> bool:
        """Whether the chunk was evicted or tainted after the reset; a load of it is LOADABLE_AFTER_COMMIT's."""
        departed = projections.chunks.departed(key)
        return departed is not None and departed.sequence > self._reset_at
