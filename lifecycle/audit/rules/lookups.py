"""Lookups: what a lookup finds, what the answer is, and when a lookup is deferred."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.forgotten import LIFE
from kvledger.lifecycle.reader.records import NEVER, Copy, Life


class LookupPure(Checker):
    """LOOKUP_PURE: an answer depends on the cache and on its own lookup, not on earlier lookups.

    Verifies: of every answer:

    - An answer offers max(0, min(usable part of the recorded hit, num_tokens - 1) - num_computed_tokens) tokens. If the
      request is quarantined or must compute tokens first, or if a load would be slower, no part is usable. With sliding
      windows an answer may offer fewer tokens. If vLLM's own prefix hit ends inside a block, the answer is 0 tokens.
    - With one group of layers, an answer is asynchronous if and only if the settings in the log's header demand an
      asynchronous load for the number of offered tokens. With several groups, every answer that offers tokens is
      asynchronous. An answer of 0 tokens is never asynchronous.
    - An answer or a deferral has the same `num_tokens` and `num_computed_tokens` as its lookup.
    - An answer has the same hit and offers the same number of tokens as the previous answer to its request, if nothing
      on which an answer depends has changed in between.

    Does not verify: whether the last token is left to compute (LAST_TOKEN); whether a load that is not offered would be
    slower than computing (LONGEST_HIT); whether the tokens of the recorded hit are stored. RESET_EPOCH and
    LOADABLE_AFTER_COMMIT find offered tokens that are not stored. `kvledger verify` finds every other wrong hit when it
    makes the decision again.
    """

    rule = "LOOKUP_PURE"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._asked: tuple[int, e.LookupRequested | None] = (0, None)
        self._answered: dict[str, tuple[int, tuple[object, ...], tuple[int, int]]] = {}
        """Request id → (sequence number, everything on which the answer may depend, the answer) of its last answer."""
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
        """Check that the answer is asynchronous if and only if its load must be asynchronous.

        With several groups every load must be asynchronous, because a failed load within a step would end the engine
        (scheduler.py, 0.32).
        """
        num_tokens, async_from = event.num_external_tokens, self.configuration.async_load_tokens
        if self.layout.num_groups > 1:
            async_from = 0
        if event.is_async and not num_tokens:
            self.broken("the answer is asynchronous, but offers nothing to load", event.cause)
        elif num_tokens and event.is_async is not (async_from is not None and num_tokens >= async_from):
            kinds = ("synchronous", "asynchronous")
            what = f"the answer makes a load of {num_tokens} tokens {kinds[event.is_async]}"
            self.broken(f"{what}, but the settings make it {kinds[not event.is_async]}", event.cause)

    @on(e.LookupDeferred)
    def _compare(self, event: e.LookupAnswered | e.LookupDeferred) -> None:
        """Check that the answer has the token counts of its lookup."""
        asked_at, asked = self._asked
        if asked is None or asked_at != event.cause or asked.request_id != event.request_id:
            return
        if asked.num_computed_tokens != event.num_computed_tokens or asked.num_tokens != event.num_tokens:
            detail = (
                f"vLLM asked with {asked.num_computed_tokens} of {asked.num_tokens} tokens computed, "
                f"but {event.id} has {event.num_computed_tokens} of {event.num_tokens}"
            )
            self.broken(detail, event.cause)

    def _check_again(self, event: e.LookupAnswered, life: Life) -> None:
        request_id, chunks, keys = event.request_id, self.chunks, life.keys
        tail = self.tails.saved(life)
        now = (
            life.generation,
            life.quarantined,
            (event.num_computed_tokens, event.num_tokens),
            (len(keys), keys[-1] if keys else b""),  # a key covers all chunks before it
            (chunks.num_added, chunks.num_removed),
            0 if tail is None else tail.end_token,
            (len(self.copies), self.copies.last_id) if self._forgets else (),  # with windows, loads in flight count
            event.miss_reason == e.MissReason.SLOWER,
        )
        answer = (event.num_hit_tokens, event.num_external_tokens)
        before = self._answered.get(request_id)
        if before is not None and before[2] != answer and before[1] == now:
            detail = (
                f"a hit of {answer[0]} tokens and an answer of {answer[1]} tokens; an equal lookup before had a hit of "
                f"{before[2][0]} and an answer of {before[2][1]} tokens, and nothing has changed since"
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
        # With windows, a load may have to end earlier. GROUP_AGREEMENT checks where.
        is_less = self._forgets and 0 <= event.num_external_tokens < expected
        # LAST_TOKEN reports an answer of every known token, which leaves nothing to compute.
        is_whole = usable >= num_tokens == num_computed_tokens + event.num_external_tokens
        if not is_less and not is_whole:
            detail = (
                f"answered {event.num_external_tokens} tokens instead of {expected}: the usable hit covers {usable} of "
                f"{num_tokens} tokens, and {num_computed_tokens} tokens are already computed"
            )
            self.broken(detail, event.cause)


class LongestHit(Checker):
    """LONGEST_HIT: a lookup finds the whole stored prefix, and its answer says why the hit ends or is not used.

    The recorded hit covers the request's chunks before the first chunk that is not committed, and then the request's
    own saved tail if the tail begins there.

    Verifies: the hit that every answer records, even if the answer offers only a part of it, and the recorded
    reason why the hit ends or is not used. For example, the next chunk is missing or being saved, the request is
    quarantined, the request must compute tokens first because a load failed, or the load would take longer than
    computing.
    Does not verify: hits that a sliding window limits (GROUP_AGREEMENT); a hit of more tokens than are stored
    (LOADABLE_AFTER_COMMIT, RESET_EPOCH); how much of the hit is offered (LOOKUP_PURE, GROUP_AGREEMENT).
    """

    rule = "LONGEST_HIT"

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        life = self.lives.get(event.request_id)
        if life is None:
            return
        hit, reason = self._expected(event, life, self.chunks.num_committed(life))
        if event.num_hit_tokens > hit or reason == "window":
            return  # LOADABLE_AFTER_COMMIT, RESET_EPOCH and GROUP_AGREEMENT check these
        if hit != event.num_hit_tokens:
            self.broken(f"a hit of {event.num_hit_tokens} tokens was found, but {hit} are stored", event.cause)
        elif reason != event.miss_reason:
            detail = f"the recorded reason for the end of the hit is {event.miss_reason}, but the log shows {reason}"
            self.broken(detail, event.cause)

    def _expected(self, event: e.LookupAnswered, life: Life, num_chunks: int) -> tuple[int, str]:
        """Return (hit in tokens, reason why the hit ends), computed from the log."""
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
    """DEFER_BOUNDED: a lookup is deferred for a job in flight, and only a limited number of times.

    At most `max_deferred_lookups` lookups of a request are deferred in a row. If several deferrals in a row are for the
    same load, the connector need count only the first of them, because every load ends.

    Verifies: the number of deferrals in a row that each deferral records is right and within the limit. Every deferral
    is for one of these jobs:

    - a save that is in flight
    - if vLLM's prefix cache is on, an asynchronous load in flight for another request, which loads chunks that the
      deferred request also has
    - if the model has sliding windows, any load that is in flight

    Does not verify: whether the deferral saved time.
    """

    rule = "DEFER_BOUNDED"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._in_a_row: dict[str, int] = {}
        self._last_load: dict[str, int] = {}
        """Request id → id of the job for which the request's lookup was last deferred."""
        model.forgotten.at((e.RequestArrived, e.RequestPreempted, e.RequestFinished), self._in_a_row)
        model.forgotten.at((e.RequestArrived, e.RequestPreempted, e.RequestFinished), self._last_load)

    def begin(self) -> None:
        """Mark the number of deferred lookups in a row as unknown until an event has it."""
        self._in_a_row.update((life.request_id, NEVER) for life in self.lives)

    @on(e.LookupDeferred)
    def _deferred(self, event: e.LookupDeferred) -> None:
        job, before = self.copies.get(event.job_id), self._in_a_row.get(event.request_id, 0)
        is_same_load = job is not None and job.is_load and self._last_load.get(event.request_id) == event.job_id
        is_told_again = before == NEVER or (before and is_same_load and event.num_deferred == before)
        count = event.num_deferred if is_told_again else before + 1
        self._in_a_row[event.request_id], self._last_load[event.request_id] = count, event.job_id
        if job is None:
            self.broken(f"the lookup is deferred for job {event.job_id}, which is not in flight", event.cause)
        elif job.is_load and not self.layout.has_windows and not self._is_shared(job):
            detail = (
                f"the lookup is deferred for load {event.job_id}, but a lookup may wait only for another request's "
                "asynchronous load of the same chunks, and only if vLLM's prefix cache is on"
            )
            self.broken(detail, job.sequence, event.cause)
        maximum = self.configuration.max_deferred_lookups
        if count > maximum or event.num_deferred != count:
            detail = f"{count} deferrals in a row (recorded: {event.num_deferred}), but at most {maximum} are allowed"
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
