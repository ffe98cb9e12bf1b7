"""RESET_EPOCH: what was cached before a reset is never offered again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.chunks import Chunks
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.jobs import InFlight, JobsInFlight
from kvledger.lifecycle.audit.model.lives import Lives
from kvledger.lifecycle.audit.model.tails import Tails
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.replay import Check, ReplayedEvent
from kvledger.lifecycle.states import BlocksRegion, RequestState

_PREEMPTED = RequestState.PREEMPTED


class ResetEpoch:
    """After a reset the cache is empty, and only saves issued since then fill it.

    Verifies: no chunk and no tail survives a reset; a save issued before a reset and completed after it commits
    nothing; every chunk of an answered hit was committed since the last reset, and so was the tail it ends with; of
    what a request had computed at a reset nothing is saved until it begins anew, also not by a session's next turn.
    Does not verify: the local prefix cache of the engine, and loads that were in flight during the reset.
    """

    rule: ClassVar[str] = "RESET_EPOCH"

    def __init__(self) -> None:
        self._reset_at = 0
        self._jobs: JobsInFlight
        self._committed: Chunks
        self._tails: Tails
        self._lives: Lives
        self._stale: dict[str, None] = {}
        """Requests that have held blocks since before the last reset, or lost them since."""
        self._seen: dict[str, tuple[int, int, bytes]] = {}
        """Request id -> (removals counted by the chunk index then, chunks found good, key of the last of them).

        A key hashes all before it, so an equal last key means equal keys: this spares the polls.
        """

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        model.forgotten.at(LIFE, self._seen, self._stale)
        self._jobs, self._committed, self._tails = model.jobs, model.chunks, model.tails
        self._lives = model.lives
        return [
            (e.LookupAnswered, self._answered),
            (e.SaveIssued, self._issued),
            (e.TailSaveIssued, self._issued),
            (e.SaveCompleted, self._settled),
            (e.SaveFailed, self._settled),
            (e.CacheReset, self._check_reset),
            (e.LookupRequested, self._begins_anew),
            (e.BlocksAllocated, self._allocated),
            (e.TokensRolledBack, self._rolled_back),
        ]

    def _answered(
        self, event: e.LookupAnswered, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        if self._jobs.epoch and event.num_hit_tokens:
            return self._check_hit(event, step, projections)
        return None

    def _issued(
        self, event: e.SaveIssued | e.TailSaveIssued, step: ReplayedEvent, projections: Projections
    ) -> list[Violation] | None:
        if not self._stale or event.request_id not in self._stale:
            return None
        detail = f"save {event.job_id} copies what was computed on top of KV from before the reset"
        return [violation(self.rule, step, projections, detail, self._reset_at, event.cause)]

    def _begins_anew(self, event: e.LookupRequested, _step: ReplayedEvent, _projections: Projections) -> None:
        self._stale.pop(event.request_id, None)

    def _allocated(self, event: e.BlocksAllocated, step: ReplayedEvent, _projections: Projections) -> None:
        if step.state_before is _PREEMPTED:
            self._stale.pop(event.request_id, None)

    def _rolled_back(self, event: e.TokensRolledBack, _step: ReplayedEvent, _projections: Projections) -> None:
        if not event.num_computed_tokens:
            self._stale.pop(event.request_id, None)

    def _settled(
        self, _event: e.SaveCompleted | e.SaveFailed, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        job = self._jobs.current
        if job is None or job.epoch == self._jobs.epoch:
            return None
        return self._check_late_save(job, step, projections)

    def _check_reset(self, _event: e.CacheReset, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        self._reset_at = step.sequence
        self._seen.clear()
        self._stale.clear()
        self._stale.update(
            (record.request_id, None) for record in projections.tracker if record.blocks is not BlocksRegion.NONE
        )
        if len(projections.chunks):
            yield violation(self.rule, step, projections, f"{len(projections.chunks)} chunks survived the reset")
        if len(projections.tails):
            yield violation(self.rule, step, projections, f"{len(projections.tails)} tails survived the reset")

    def _check_late_save(self, job: InFlight, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
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
        tail = self._tails.saved(self._lives.get(event.request_id))
        if of_tail and (tail is None or tail.end_token != event.num_hit_tokens):
            detail = f"the hit of {event.num_hit_tokens} tokens counts a tail of {of_tail}, not saved since the reset"
            yield violation(self.rule, step, projections, detail, self._reset_at, event.cause)
            return
        num_removed = projections.chunks.num_removed
        keys = projections.chunk_keys.of(event.request_id)
        removed_then, num_seen, last_key = self._seen.get(event.request_id, (num_removed, 0, b""))
        is_as_seen = removed_then == num_removed and 0 < num_seen <= len(keys) and keys[num_seen - 1] == last_key
        first = num_seen if is_as_seen else 0
        for chunk, key in enumerate(keys[first:num_chunks], first):
            if key not in self._committed and not self._left_since(key, projections):
                detail = f"the hit of {event.num_hit_tokens} tokens counts chunk {chunk}, not saved since the reset"
                yield violation(self.rule, step, projections, detail, self._reset_at, event.cause)
                return
        if 0 < num_chunks <= len(keys):
            self._seen[event.request_id] = (num_removed, num_chunks, keys[num_chunks - 1])

    def _left_since(self, key: bytes, projections: Projections) -> bool:
        """Whether the chunk was evicted or tainted after the reset; a load of it is LOADABLE_AFTER_COMMIT's."""
        departed = projections.chunks.departed(key)
        return departed is not None and departed.sequence > self._reset_at
