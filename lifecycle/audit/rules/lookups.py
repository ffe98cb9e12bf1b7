"""Lookups: what is found, what is answered, and when an answer is put off."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.forgotten import LIFE
from kvledger.lifecycle.reader.records import NEVER, Copy, Life


class LookupPure(Checker):
    """LOOKUP_PURE: an answer depends on what is cached and on this call, never on how often was asked.

    k lookups equal one, and each answer is computed against the `num_computed_tokens` of its own call.

    Verifies: answer = max(0, min(usable part of the recorded hit, num_tokens - 1) - num_computed_tokens), and 0
    for a local hit that ends inside a block; an answer is asynchronous if and only if the header says so of a load of
    so many tokens: always if there are several groups of layers, never for an answer of 0; the answer repeats the
    question; two lookups of a request between which nothing it depends on changed give the same hit and the same
    answer.
    Does not verify: whether the last token is left to compute (LAST_TOKEN), whether a load that is not offered would
    have been slower than computing (LONGEST_HIT), nor whether the recorded hit is there (RESET_EPOCH
    and LOADABLE_AFTER_COMMIT see what is promised and not there; deciding again sees every other difference).
    """

    rule = "LOOKUP_PURE"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._asked: tuple[int, e.LookupRequested | None] = (0, None)
        self._answered: dict[str, tuple[int, tuple[object, ...], tuple[int, int]]] = {}
        """Request id -> (sequence, all that the answer may depend on, the answer)."""
        model.forgotten.at(LIFE, self._answered)
        self._forgets = model.layout.has_windows

    @on(e.LookupRequested)
    def _requested(self, event: e.LookupRequested) -> None:
        self._asked = (self.moment.sequence, event)

    @on(e.LookupAnswered)
    def _check(self, event: e.LookupAnswered) -> None:
        self._compare(event)
        self._check_kind(event)
        life = self.moment.life
        if life is not None:
            self._check_sum(event, life)
            self._check_again(event, life)

    def _check_kind(self, event: e.LookupAnswered) -> None:
        """A load within the step that fails ends an engine with several groups (scheduler.py, 0.32)."""
        num_tokens, async_from = event.num_external_tokens, self.configuration.async_load_tokens
        if self.layout.num_groups > 1:
            async_from = 0
        if event.is_async and not num_tokens:
            self.broken("asynchronous, with nothing to load", event.cause)
        elif num_tokens and event.is_async is not (async_from is not None and num_tokens >= async_from):
            kinds = ("within the step", "asynchronous")
            what = f"a load of {num_tokens} tokens is answered as {kinds[event.is_async]}"
            self.broken(f"{what}, but the settings make it {kinds[not event.is_async]}", event.cause)

    @on(e.LookupDeferred)
    def _compare(self, event: e.LookupAnswered | e.LookupDeferred) -> None:
        """Does it repeat the question?"""
        asked_at, asked = self._asked
        if asked is None or asked_at != event.cause or asked.request_id != event.request_id:
            return
        if asked.num_computed_tokens != event.num_computed_tokens or asked.num_tokens != event.num_tokens:
            detail = (
                f"asked with {asked.num_computed_tokens} of {asked.num_tokens} tokens computed, "
                f"{event.id} for {event.num_computed_tokens} of {event.num_tokens}"
            )
            self.broken(detail, event.cause)

    def _check_again(self, event: e.LookupAnswered, life: Life) -> None:
        request_id, chunks, keys = event.request_id, self.chunks, life.keys
        tail = self.tails.saved(life)
        now = (
            life.generation,
            life.quarantined,
            (event.num_computed_tokens, event.num_tokens),
            (len(keys), keys[-1] if keys else b""),  # a key hashes all before it
            (chunks.num_added, chunks.num_removed),
            0 if tail is None else tail.end_token,
            (len(self.copies), self.copies.last_id) if self._forgets else (),  # what is being loaded may then count
            event.miss_reason == e.MissReason.SLOWER,
        )
        answer = (event.num_hit_tokens, event.num_external_tokens)
        before = self._answered.get(request_id)
        if before is not None and before[2] != answer and before[1] == now:
            detail = (
                f"a hit of {answer[0]} and an answer of {answer[1]}, though an equal lookup had given "
                f"{before[2][0]} and {before[2][1]} and nothing changed since"
            )
            self.broken(detail, before[0], event.cause)
        self._answered[request_id] = (self.moment.sequence, now, answer)

    def _check_sum(self, event: e.LookupAnswered, life: Life) -> None:
        num_tokens, num_computed_tokens = event.num_tokens, event.num_computed_tokens
        gets_nothing = life.quarantined or life.computes_first
        gets_nothing = gets_nothing or event.miss_reason == e.MissReason.SLOWER
        usable = 0 if gets_nothing else event.num_hit_tokens
        expected = max(0, min(usable, num_tokens - 1) - num_computed_tokens)
        if num_computed_tokens % self.configuration.block_size:
            expected = 0
        if event.num_external_tokens == expected:
            return
        # Where groups see only a window, a load may have to end earlier; GROUP_AGREEMENT looks at where.
        is_less = self._forgets and 0 <= event.num_external_tokens < expected
        # A hit of every known token that is answered as it is leaves nothing to compute: LAST_TOKEN says so.
        is_whole = usable >= num_tokens == num_computed_tokens + event.num_external_tokens
        if not is_less and not is_whole:
            detail = (
                f"answered {event.num_external_tokens}, but a usable hit of {usable} of {num_tokens} tokens "
                f"with {num_computed_tokens} computed gives {expected}"
            )
            self.broken(detail, event.cause)


class LongestHit(Checker):
    """LONGEST_HIT: a lookup is answered with the whole prefix that is there, and why it ends where it ends.

    A recorded hit reaches as far as committed chunks of the request do without a gap, and its own saved tail behind.

    Verifies: this for every answer, before any limit. Where it ends for want of a chunk, whether that is being saved;
    where less is used, that the request is quarantined, computes first, would load for longer than compute, or has a
    window that sees what is not stored.
    Does not verify: a hit of more than is there (LOADABLE_AFTER_COMMIT, RESET_EPOCH); what is answered of it
    (LOOKUP_PURE, GROUP_AGREEMENT).
    """

    rule = "LONGEST_HIT"

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        life = self.lives.get(event.request_id)
        if life is None:
            return
        hit, reason = self._expected(event, life, self.chunks.num_committed(life))
        if event.num_hit_tokens > hit or reason == "window":
            return  # more than is there: LOADABLE_AFTER_COMMIT, RESET_EPOCH and GROUP_AGREEMENT look at that
        if hit != event.num_hit_tokens:
            self.broken(f"a hit of {event.num_hit_tokens} tokens was found, but {hit} are there", event.cause)
        elif reason != event.miss_reason:
            detail = f"the hit ends for the reason {event.miss_reason}, but the log tells {reason}"
            self.broken(detail, event.cause)

    def _expected(self, event: e.LookupAnswered, life: Life, num_chunks: int) -> tuple[int, str]:
        """The hit in tokens and the reason why it ends, as the log tells it."""
        model = self.model
        hit = num_chunks * model.layout.chunk_size
        reason = self._why_chunks_end(life, num_chunks)
        tail = model.tails.saved(life)
        if tail is not None and tail.first_token == hit:
            hit = tail.end_token
            if hit >= event.num_tokens - 1:
                reason = "complete"
        usable = hit
        if model.is_slower_to_load(event, usable):
            usable, reason = 0, "slower"
        if life.computes_first:
            usable, reason = 0, "load_failed"
        if life.quarantined:
            usable, reason = 0, "quarantined"
        if model.layout.has_windows:
            end_token = min(usable, event.num_tokens - 1)
            if model.longest_seen(life, end_token) != end_token:
                reason = "window"
        return hit, reason

    def _why_chunks_end(self, life: Life, num_chunks: int) -> str:
        if num_chunks >= len(life.keys):
            return "complete"
        return "saving" if life.keys[num_chunks] in self.chunks.saving else "missing"


class DeferBounded(Checker):
    """DEFER_BOUNDED: a lookup is put off for a job under way, and not for ever.

    Every deferred lookup names a job in flight, and there are at most `max_deferred_lookups` in a row. Further ones for
    the same load need not count, because a load ends by itself.

    Verifies: the job is a save that has not been settled; or another request's asynchronous load of chunks that this
    request lacks, where vLLM's prefix cache is on; or with windows any such job. The count in a row, with a count of
    the checker's own.
    Does not verify: that waiting was worth it.
    """

    rule = "DEFER_BOUNDED"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._in_a_row: dict[str, int] = {}
        self._last_load: dict[str, int] = {}
        """Request id -> the load for which its last lookup was put off."""
        model.forgotten.at((e.RequestArrived, e.RequestPreempted, e.RequestFinished), self._in_a_row)
        model.forgotten.at((e.RequestArrived, e.RequestPreempted, e.RequestFinished), self._last_load)

    def begin(self) -> None:
        """How often in a row each request was put off is not known until an event tells it."""
        self._in_a_row.update((life.request_id, NEVER) for life in self.lives)

    @on(e.LookupDeferred)
    def _deferred(self, event: e.LookupDeferred) -> None:
        job, before = self.copies.get(event.job_id), self._in_a_row.get(event.request_id, 0)
        is_same_load = job is not None and job.is_load and self._last_load.get(event.request_id) == event.job_id
        is_told_again = before == NEVER or (before and is_same_load and event.num_deferred == before)
        count = event.num_deferred if is_told_again else before + 1
        self._in_a_row[event.request_id], self._last_load[event.request_id] = count, event.job_id
        if job is None:
            self.broken(f"put off for job {event.job_id}, which is not in flight", event.cause)
        elif job.is_load and not self.layout.has_windows and not self._is_shared(job):
            detail = f"put off for load {event.job_id}, which brings none of the chunks that the request lacks"
            self.broken(detail, job.sequence, event.cause)
        maximum = self.configuration.max_deferred_lookups
        if count > maximum or event.num_deferred != count:
            detail = f"put off {count} times in a row (recorded: {event.num_deferred}), at most {maximum} may be"
            self.broken(detail, event.cause)

    def _is_shared(self, load: Copy) -> bool:
        life = self.moment.life
        if life is None or not self.configuration.awaits_shared_loads:
            return False
        return load.is_async and load.ordinal != life.ordinal and not set(load.keys).isdisjoint(life.keys)

    @on(e.LookupAnswered)
    def _forget(self, event: e.LookupAnswered) -> None:
        self._in_a_row.pop(event.request_id, None)
        self._last_load.pop(event.request_id, None)

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        self._in_a_row.clear()
        self._last_load.clear()
