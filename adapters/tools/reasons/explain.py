"""Finds the reason of every token that an answered lookup leaves to compute.

The reasons depend only on the answer, and on the request's account and the chunks' history at the time of the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from kvledger.adapters.tools.reasons import recorded
from kvledger.adapters.tools.reasons.chunk_history import AT_REST, ChunkFact, ChunkStatus
from kvledger.adapters.tools.reasons.memory import Account, Memory
from kvledger.adapters.tools.reasons.reason import BY_DESIGN, Reason
from kvledger.adapters.tools.reasons.spans import Span, joined
from kvledger.lifecycle import LedgerConfiguration, MissReason
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import NEVER, Life

_GONE: dict[ChunkStatus, Reason] = {
    ChunkStatus.SAVING: Reason.SAVING,
    ChunkStatus.DECLINED: Reason.DECLINED,
    ChunkStatus.SAVE_FAILED: Reason.SAVE_FAILED,
    ChunkStatus.SAVED: Reason.BEHIND_GAP,
    ChunkStatus.OFFERED: Reason.BEHIND_GAP,
    ChunkStatus.EVICTED: Reason.EVICTED,
    ChunkStatus.TAINTED: Reason.TAINTED,
    ChunkStatus.RESET: Reason.RESET,
}
_OF_ALL: dict[str, Reason] = {
    MissReason.QUARANTINED: Reason.QUARANTINED,
    MissReason.LOAD_FAILED: Reason.LOAD_FAILED,
}
"""Miss reason of an answer → reason of the tokens that the request then computes, even if the pool has them."""


@attrs.define
class Explainer:
    """Finds the reasons of the tokens that a lookup leaves to compute."""

    configuration: LedgerConfiguration
    memory: Memory

    def explain(self, answer: e.LookupAnswered, sequence: int, life: Life, account: Account) -> tuple[Span, ...]:
        """Return the reasons of all tokens from the end of the offer to the last known token."""
        last = answer.num_tokens - 1
        offered_end = answer.num_computed_tokens + answer.num_external_tokens
        hit_end = min(answer.num_hit_tokens, last)
        of_last = Span(max(offered_end, last), answer.num_tokens, Reason.LAST_TOKEN, (sequence,))
        if answer.miss_reason == MissReason.RECORDED:
            of_recorded = _AfterRecordedHit(self, life, account, sequence, answer)
            return joined((*_after_gaps(of_recorded.spans(offered_end, last)), of_last))
        after_hit = _AfterHit(self, life, account, sequence, answer)
        return joined(
            (
                *self._cut(answer, sequence, account, offered_end, hit_end),
                *after_hit.spans(max(offered_end, hit_end), last),
                of_last,
            )
        )

    def without_answer(
        self, first_token: int, num_tokens: int, sequence: int, life: Life, account: Account, *, reason: Reason
    ) -> tuple[Span, ...]:
        """Return the reasons of tokens for which the log has no lookup.

        Each token gets `reason`, except for tokens that no cache could have provided.
        """
        last = num_tokens - 1
        after_hit = _AfterHit(self, life, account, sequence, None, reason)
        return joined(
            (
                *after_hit.spans(first_token, last),
                Span(max(first_token, last), num_tokens, Reason.LAST_TOKEN, (sequence,)),
            )
        )

    def _cut(
        self, answer: e.LookupAnswered, sequence: int, account: Account, first_token: int, end_token: int
    ) -> Iterator[Span]:
        """Yield the tokens inside the hit that were not offered, with their reason."""
        if answer.miss_reason in _OF_ALL:
            evidence = account.quarantine if answer.miss_reason == MissReason.QUARANTINED else account.load_failed
            yield Span(first_token, end_token, _OF_ALL[answer.miss_reason], (*evidence, sequence))
        elif answer.miss_reason == MissReason.WINDOW:
            yield Span(first_token, end_token, Reason.WINDOW, (sequence,))
        else:
            yield Span(first_token, end_token, self._why_cut(answer), (sequence,))

    def _why_cut(self, answer: e.LookupAnswered) -> Reason:
        if answer.miss_reason == MissReason.SLOWER:
            return Reason.SLOWER
        if answer.num_computed_tokens % self.configuration.block_size:
            return Reason.UNALIGNED
        if len(self.configuration.windows) > 1 and not answer.num_external_tokens:
            return Reason.RIVAL_LOAD
        return Reason.UNKNOWN


@attrs.frozen
class _AfterHit:
    """Finds the reasons of the tokens after the hit, chunk by chunk."""

    explainer: Explainer
    life: Life
    account: Account
    sequence: int
    answer: e.LookupAnswered | None
    instead: Reason | None = None

    def spans(self, first_token: int, end_token: int) -> Iterator[Span]:
        """Yield the tokens from `first_token` to before `end_token`, with their reasons."""
        at = first_token
        num_tokens = end_token + 1 if self.answer is None else self.answer.num_tokens
        while at < end_token:
            end = min(end_token, *(bound for bound in self._bounds(at, num_tokens) if bound > at))
            span = self._reason_of(at, end)
            yield self._overruled(span)
            at = end

    def _bounds(self, at: int, num_tokens: int) -> tuple[int, ...]:
        size = self.explainer.configuration.chunk_size
        tail = self.account.tail
        of_tail = () if tail is None else (tail.first_token, tail.end_token)
        bounds = (self._mark, *of_tail)
        end, end_of_whole = (at // size + 1) * size, num_tokens // size * size
        if 0 <= at // size < len(self.life.keys) or end >= end_of_whole:
            return (end, *bounds)
        # Whole chunks without keys share one reason. A log may count far more tokens than it has keys for.
        return (end_of_whole, *bounds, *(bound // size * size for bound in bounds))

    @property
    def _mark(self) -> int:
        """Number of tokens that were computed before a preemption."""
        return self.life.num_tokens_before_preemption

    def _overruled(self, span: Span) -> Span:
        """Replace the span's reason if the request would compute the tokens even if the pool had them."""
        reason = self.instead
        if self.answer is not None:
            reason = _OF_ALL.get(self.answer.miss_reason)
        was_computed = span.first_token < self._mark
        if reason is None or (span.reason in BY_DESIGN and not was_computed):
            return span
        return Span(span.first_token, span.end_token, reason, (*self._evidence(reason), self.sequence))

    def _evidence(self, reason: Reason) -> tuple[int, ...]:
        if reason is Reason.QUARANTINED:
            return self.account.quarantine
        if reason is Reason.LOAD_FAILED:
            return self.account.load_failed
        if reason is Reason.HOOK_FAILED:
            return (self.account.hook_failed,)
        if reason is Reason.WITHHELD:
            return (self.account.withheld,)
        return ()

    def _reason_of(self, first_token: int, end_token: int) -> Span:
        life, size = self.life, self.explainer.configuration.chunk_size
        chunk = first_token // size
        tail = self.account.tail
        if tail is not None and tail.first_token <= first_token < tail.end_token:
            return self._from_fact(first_token, end_token, tail.fact)
        if not 0 <= chunk < len(life.keys):
            return self._without_key(first_token, end_token)
        fact = self.explainer.memory.chunks.get(life.keys[chunk])
        miss_reason = self._miss_reason_of(first_token)
        if miss_reason == MissReason.SAVING:
            return self._being_saved(first_token, end_token, fact)
        span = self._from_fact(first_token, end_token, fact)
        # One of the missing events may have been the save of the chunk.
        may_be_lost = first_token >= self._mark or span.reason is Reason.UNSAVED
        is_in_pool = span.reason in {Reason.BEHIND_GAP, Reason.SAVING, Reason.DEFERRAL_EXHAUSTED}
        contradicts = miss_reason == MissReason.MISSING and is_in_pool
        if contradicts or (may_be_lost and self._is_history_lost(fact)):
            return Span(first_token, end_token, Reason.UNKNOWN, (self.sequence,))
        return span

    def _is_history_lost(self, fact: ChunkFact | None) -> bool:
        """Whether a missing event may be about this chunk. False if `fact` says what happened to the chunk."""
        memory = self.explainer.memory
        is_known = fact is not None and fact.status is not ChunkStatus.KNOWN
        return not is_known and memory.state.is_blind and not memory.chunks.has_forgotten

    def _without_key(self, first_token: int, end_token: int) -> Span:
        life, size = self.life, self.explainer.configuration.chunk_size
        num_tokens = end_token + 1 if self.answer is None else self.answer.num_tokens
        if (first_token // size + 1) * size <= num_tokens:
            reason = Reason.UNKNOWN if life.is_partial else Reason.NO_KEY
            reason = Reason.QUARANTINED if life.quarantined else reason
            return Span(first_token, end_token, reason, (*self.account.quarantine, self.sequence))
        if first_token < self._mark:
            return self._never_saved(first_token, end_token, None)
        return Span(first_token, end_token, Reason.PARTIAL_CHUNK, (self.sequence,))

    def _miss_reason_of(self, first_token: int) -> str:
        """Return the answer's miss reason if the token is in the first chunk after the hit; otherwise an empty text."""
        size = self.explainer.configuration.chunk_size
        is_first = self.answer is not None and first_token // size == self.answer.num_hit_tokens // size
        return self.answer.miss_reason if self.answer is not None and is_first else ""

    def _being_saved(self, first_token: int, end_token: int, fact: ChunkFact | None) -> Span:
        span = self._from_fact(first_token, end_token, fact)
        # A save that was in flight at the answer may have failed before vLLM allocated blocks.
        agrees = span.reason in {Reason.SAVING, Reason.DEFERRAL_EXHAUSTED, Reason.SAVE_FAILED}
        return span if agrees else Span(first_token, end_token, Reason.SAVING, (self.sequence,))

    def _from_fact(self, first_token: int, end_token: int, fact: ChunkFact | None) -> Span:
        account = self.account
        if fact is None or fact.status is ChunkStatus.KNOWN:
            return self._never_saved(first_token, end_token, fact)
        reason = _GONE[fact.status]
        evidence = tuple(_evidence_of(fact))
        limit = self.explainer.configuration.max_deferred_lookups
        if reason is Reason.SAVING and account.num_deferred and account.num_deferred >= limit:
            return Span(first_token, end_token, Reason.DEFERRAL_EXHAUSTED, (*evidence, *account.deferrals), fact)
        return Span(first_token, end_token, reason, evidence, fact)

    def _never_saved(self, first_token: int, end_token: int, fact: ChunkFact | None) -> Span:
        life = self.life
        if first_token < self._mark:
            size = self.explainer.configuration.chunk_size
            if life.quarantined:
                return Span(first_token, end_token, Reason.QUARANTINED, self.account.quarantine)
            if life.reset_at > self.account.started_at:  # the request got no other blocks since
                return Span(first_token, end_token, Reason.STALE, (life.reset_at, life.preempted_at))
            if (first_token // size + 1) * size > self._mark:  # the chunk was part-filled at the preemption
                return self._not_copied(first_token, end_token)
            return Span(first_token, end_token, Reason.UNSAVED, (life.preempted_at,), fact)
        if fact is None or self._is_own(fact):
            return Span(first_token, end_token, Reason.SALTED if life.is_salted else Reason.NEW, (self.sequence,))
        return Span(first_token, end_token, Reason.UNSAVED, tuple(_evidence_of(fact)), fact)

    def _is_own(self, fact: ChunkFact) -> bool:
        """Whether this life was the first that had the chunk's key.

        Facts about a life whose beginning is missing have no ordinal until a decision names the life.
        """
        life = self.life
        is_unnamed = fact.ordinal == NEVER and life.is_partial
        return fact.request_id == life.request_id and (fact.ordinal == life.ordinal or is_unnamed)

    def _not_copied(self, first_token: int, end_token: int) -> Span:
        """Return the reason of tail tokens that were computed before the preemption, but not saved."""
        size = self.explainer.configuration.chunk_size
        if self.answer is not None and first_token // size > self.answer.num_hit_tokens // size:
            return Span(first_token, end_token, Reason.BEHIND_GAP, (self.sequence,))
        return Span(first_token, end_token, Reason.PARTIAL_CHUNK, (self.life.preempted_at,))


_IN_REACH = frozenset({Reason.NEVER_OFFERED, Reason.NOT_OFFERED})


@attrs.frozen
class _AfterRecordedHit(_AfterHit):
    """Finds the reasons of tokens that a recorded connector did not offer."""

    def _from_fact(self, first_token: int, end_token: int, fact: ChunkFact | None) -> Span:
        span = super()._from_fact(first_token, end_token, fact)
        if span.reason in {Reason.NEW, Reason.SALTED, Reason.STALE, Reason.PARTIAL_CHUNK, Reason.QUARANTINED}:
            return span
        if self.life.skips_prefix_cache:
            return attrs.evolve(span, reason=Reason.SKIPPED, evidence=(self.life.arrived_at, self.sequence))
        reason, evidence = self._why(first_token, fact, span.reason), span.evidence
        if reason is Reason.RESET_UNSAVED:
            evidence = (*evidence, self._state.reset_at)
        return Span(first_token, end_token, reason, evidence, fact)

    @property
    def _state(self) -> recorded.State:
        return self.explainer.memory.state.recorded

    def _why(self, first_token: int, fact: ChunkFact | None, reason: Reason) -> Reason:
        """Return the reason for a whole chunk that was computed before; `reason` if the log shows no better one."""
        status = None if fact is None else fact.status
        if status in AT_REST and not self._is_whole_unit(first_token):
            return Reason.SHORT_OF_UNIT
        if status in AT_REST:
            return Reason.NEVER_OFFERED if status is ChunkStatus.SAVED else Reason.NOT_OFFERED
        if reason is not Reason.UNSAVED:
            return reason
        if fact is not None and self._is_being_computed(first_token, fact):
            return Reason.COMPUTING
        return Reason.RECORDED if self._state.lacks_saves else self._why_lost_here(fact)

    def _why_lost_here(self, fact: ChunkFact | None) -> Reason:
        """Return the reason for a chunk that was never saved. If vLLM's prefix cache is on, the chunk has left it."""
        if not self._state.has_prefix_cache:
            return Reason.NEVER_GIVEN
        known_at = self.life.preempted_at if fact is None or self._is_own(fact) else fact.sequence
        return Reason.RESET_UNSAVED if self._state.reset_at > known_at else Reason.EVICTED_UNSAVED

    def _is_being_computed(self, first_token: int, fact: ChunkFact) -> bool:
        """Whether another life had the chunk's key first, and has not computed the whole chunk yet."""
        lives, size = self.explainer.memory.model.lives, self.explainer.configuration.chunk_size
        first = None if self._is_own(fact) else lives.of(fact.ordinal)
        return first is not None and lives.num_computed_tokens(first) < (first_token // size + 1) * size

    def _is_whole_unit(self, first_token: int) -> bool:
        """Whether the connector has the whole unit to which the chunk belongs.

        A unit is a run of chunks that the connector finds together. The connector has a unit if it has the last chunk.
        """
        keys, size = self.life.keys, self.explainer.configuration.chunk_size
        num_chunks = self._state.unit_tokens // size
        last = (first_token // size // num_chunks + 1) * num_chunks - 1 if num_chunks else 0
        if num_chunks <= 1:
            return True
        fact = self.explainer.memory.chunks.get(keys[last]) if last < len(keys) else None
        return fact is not None and fact.status in AT_REST


def _after_gaps(spans: Iterable[Span]) -> Iterator[Span]:
    """Give available chunks after the first missing chunk the reason `BEHIND_GAP`, because no lookup reaches them."""
    is_after_gap = False
    for span in spans:
        is_in_reach = span.reason in _IN_REACH
        yield attrs.evolve(span, reason=Reason.BEHIND_GAP) if is_in_reach and is_after_gap else span
        is_after_gap |= not is_in_reach


def _evidence_of(fact: ChunkFact | None) -> Iterator[int]:
    while fact is not None:
        yield fact.sequence
        fact = fact.earlier
