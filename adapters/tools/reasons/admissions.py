"""Reads lookups, allocations and loads to count the tokens offered, claimed, loaded, and left to compute."""

from __future__ import annotations

from operator import attrgetter

import attrs

from kvledger.adapters.tools.reasons.explain import Explainer
from kvledger.adapters.tools.reasons.memory import Account, Answer, Load, Memory
from kvledger.adapters.tools.reasons.reason import Reason
from kvledger.adapters.tools.reasons.request_history import MAX_KEPT, Admission, Lookup, SharedLoad
from kvledger.adapters.tools.reasons.spans import Span, joined, replaced, within
from kvledger.adapters.tools.reasons.sums import LoadFate, OfferFate, Sums
from kvledger.lifecycle import events as e
from kvledger.lifecycle import on
from kvledger.lifecycle.reader import NEVER, Copy, Life

_Spans = tuple[Span, ...]


class Admissions:
    """Part of `Accounts` that gets the events of lookups, allocations and loads."""

    def __init__(self, memory: Memory, explainer: Explainer) -> None:
        self._memory = memory
        self._model, self._moment = memory.model, memory.model.moment
        self._chunk_size = memory.model.configuration.chunk_size
        self._explainer = explainer

    def undecided(self, of: tuple[Life, Account] | None = None) -> Sums:
        """Return the token counts of pending offers and of loads that are not settled, of one life or of all lives."""
        state, sums = self._memory.state, Sums()
        for account in state.accounts.values() if of is None else (of[1],):
            if account.answer is not None:
                sums.offered[OfferFate.PENDING] += account.answer.event.num_external_tokens
            sums.num_to_load += account.undelivered
            sums.to_load[LoadFate.UNDER_WAY] += account.undelivered
        loads = state.loads.values() if of is None else self._loads_of(of[0])
        sums.to_load[LoadFate.UNDER_WAY] += sum(load.num_tokens for load in loads)
        return sums

    def load_for(self, admission: Admission) -> Load | None:
        """Return the load in flight for an admission; None if no load is in flight for it."""
        return self._memory.state.loads.get(admission.job_id) if admission.job_id else None

    @staticmethod
    def note_not_loaded(account: Account, admission: Admission, load: Load, evidence: tuple[int, ...]) -> None:
        """Record that `load` loaded no token.

        Also record the tokens as never computed, if `admission` is the present one and had no other unloaded tokens.
        """
        first, end = load.first_token, load.first_token + load.num_tokens
        if not admission.not_loaded and admission is account.admission:
            account.never_computed = first, end
        admission.not_loaded = _claimed(admission, Span(first, end, Reason.LOAD_FAILED, evidence))

    def leave(self, account: Account, fate: OfferFate = OfferFate.WITHDRAWN) -> None:
        """Close the present admission. `fate` is the fate of tokens that are still offered, but not claimed."""
        self._settle_answer(account, fate)
        self.give_up_undelivered(account)
        account.admission, account.is_computing = None, False
        account.allocated_without_answer = 0

    def end(self, life: Life) -> None:
        """Detach an ended life from its loads in flight. Their outcome counts only in the sums of the whole log."""
        for load in self._loads_of(life):
            load.ordinal = NEVER

    # --- lookups ---------------------------------------------------------------------------------

    @on(e.LookupDeferred)
    def _deferred(self, event: e.LookupDeferred) -> None:
        life = self._model.lives.of(event.ordinal)
        account = self._memory.account(life)
        if life is None or account is None:
            return
        account.withheld = 0
        self._settle_answer(account, OfferFate.ASKED_AGAIN)
        sequence = self._moment.sequence
        is_first = event.num_deferred <= 1 or not account.deferrals
        account.deferrals = (sequence,) if is_first else (account.deferrals[0], sequence)
        account.num_deferred = event.num_deferred
        account.is_computing = False
        self._note_lookup(life, account, event)

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        life = self._model.lives.of(event.ordinal)
        account = self._memory.account(life)
        if life is None or account is None:
            if self._memory.is_kept(event.request_id):  # the totals count this offer, too
                self._memory.state.ended.num_offered += event.num_external_tokens
                self._memory.state.ended.offered[OfferFate.LOST] += event.num_external_tokens
            return
        account.withheld = 0
        account.sums.num_offered += event.num_external_tokens
        self._settle_answer(account, OfferFate.ASKED_AGAIN)
        self.give_up_undelivered(account)
        account.is_computing, account.allocated_without_answer, account.hook_failed = False, 0, 0
        account.answer = Answer(self._moment.sequence, event)
        self._note_lookup(life, account, event)

    @on(e.DecisionWithheld)
    def _withheld(self, event: e.DecisionWithheld) -> None:
        account = self._memory.present(event.request_id)
        if account is not None and not event.rule:  # a broken rule has a quarantine, which proves more
            account.withheld = self._moment.sequence

    def _settle_answer(self, account: Account, fate: OfferFate) -> None:
        if account.answer is not None:
            account.sums.offered[fate] += account.answer.event.num_external_tokens
            account.answer = None

    def _note_lookup(self, life: Life, account: Account, event: e.LookupAnswered | e.LookupDeferred) -> None:
        """Add a lookup to the history, with the reasons of its misses. Consecutive equal lookups share one entry."""
        before, account.last_lookup = account.last_lookup, event
        history, sequence = account.history, self._moment.sequence
        if history is None:
            return
        if history.lookups and is_same_answer(before, event):
            last = history.lookups[-1]
            last.last_sequence, last.num_times = sequence, last.num_times + 1
            return
        if isinstance(event, e.LookupDeferred):
            lookup = Lookup(sequence, sequence, (), awaited=self._awaited(life, event))
        else:
            lookup = Lookup(sequence, sequence, self._explainer.explain(event, sequence, life, account))
        lookup.num_held = self._memory.num_held_blocks()
        history.keep(history.lookups, lookup)

    def _awaited(self, life: Life, event: e.LookupDeferred) -> SharedLoad | None:
        """Return the load because of which a lookup was deferred; None: the job is a save or loads other tokens.

        In a model with windows, a lookup also waits for loads of other tokens, because only one load runs at a time.
        """
        copy = self._model.copies.get(event.job_id)
        if copy is None or not copy.is_load:
            return None
        return self._shared(life, copy, event.num_computed_tokens, event.num_tokens)

    # --- allocations -----------------------------------------------------------------------------

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        life, sequence = self._moment.life, self._moment.sequence
        account = self._memory.account(life)
        if life is None or account is None:
            return
        self.give_up_undelivered(account)
        if event.num_external_tokens > 0:
            account.undelivered, account.undelivered_sequence = event.num_external_tokens, sequence
        answer, account.answer = account.answer, None
        if answer is None:
            # The second allocation of an asynchronous load and the next turn of a session are not admissions.
            if not account.is_computing and account.admission is None:
                account.allocated_without_answer = sequence
            return
        account.is_computing, account.last_lookup = False, None
        offered = answer.event.num_external_tokens
        num_claimed = max(0, min(event.num_external_tokens, offered))
        account.sums.offered[OfferFate.CLAIMED] += num_claimed
        account.sums.offered[OfferFate.NOT_CLAIMED] += offered - num_claimed
        first = answer.event.num_computed_tokens
        reason, proof = Reason.NOT_CLAIMED, sequence
        if account.withheld:
            reason, proof = Reason.WITHHELD, account.withheld
        elif life.skips_prefix_cache:
            reason, proof = Reason.SKIPPED, life.arrived_at
        left = Span(first + num_claimed, first + offered, reason, (proof, answer.sequence))
        num_retained = min(first, answer.event.num_tokens)
        spans = self._explainer.explain(answer.event, answer.sequence, life, account)
        account.num_deferred = 0
        self._admit(life, account, sequence, answer.sequence, num_retained, num_claimed, joined((left, *spans)))

    def admit_without_answer(self, life: Life, account: Account, first_token: int, num_tokens: int) -> Admission:
        """Begin an admission for a request that a step starts, although the log has no lookup of the request."""
        reason = Reason.NO_LOOKUP
        if self._memory.state.is_blind:
            reason = Reason.UNKNOWN
        elif account.hook_failed:
            reason = Reason.HOOK_FAILED
        elif life.quarantined:
            reason = Reason.QUARANTINED
        elif account.withheld:
            reason = Reason.WITHHELD
        at = account.allocated_without_answer or self._moment.sequence
        missed = self._explainer.without_answer(first_token, num_tokens, at, life, account, reason=reason)
        return self._admit(life, account, at, 0, min(first_token, num_tokens), 0, missed)

    def _admit(
        self,
        life: Life,
        account: Account,
        sequence: int,
        answer_sequence: int,
        num_retained: int,
        num_claimed: int,
        missed: _Spans,
    ) -> Admission:
        """Begin an admission, count its tokens, and return it."""
        mark = life.num_tokens_before_preemption
        num_tokens = num_retained + num_claimed + sum(span.num_tokens for span in missed)
        admission = account.admission = Admission(
            sequence, answer_sequence, num_tokens, num_retained, num_claimed, mark, missed, missed
        )
        self._date(admission, life, account)
        account.computed_end, account.never_computed = 0, (0, 0)
        sums = account.sums
        sums.num_admissions += 1
        sums.num_needed += num_tokens
        sums.num_retained += num_retained
        sums.num_claimed += num_claimed
        for span in missed:
            sums.missed[span.reason] += span.num_tokens
        if account.history is not None:
            admission.num_held = self._memory.num_held_blocks()
            account.history.keep(account.history.admissions, admission)
        return admission

    def _date(self, admission: Admission, life: Life, account: Account) -> None:
        """Count the admission's tokens that were computed before the last reset of only vLLM's prefix cache.

        Claimed tokens count in `num_before_reset`. Tokens that a load brought back into vLLM's prefix cache after the
        reset count in `num_retained_before_reset`.
        """
        size, chunks = self._chunk_size, self._memory.chunks
        if chunks.was_any_loaded_since_reset:
            for chunk in _known(life, 0, admission.num_retained, size):
                reset = chunks.reset_before_load(life.keys[chunk])
                if reset:
                    admission.num_retained_before_reset += min(size, admission.num_retained - chunk * size)
                    admission.reset_sequence = max(admission.reset_sequence, reset)
        tail = account.tail if account.tail is not None and account.tail.before_reset else None
        if tail is None and not chunks.is_any_from_before_reset:
            return
        first, end = admission.num_retained, admission.num_retained + admission.num_claimed
        of_tail = () if tail is None else range(tail.first_token // size, -(-tail.end_token // size))
        for chunk in sorted({*_known(life, first, end, size), *of_tail}):
            at, until = max(first, chunk * size), min(end, (chunk + 1) * size)
            if at >= until:
                continue
            reset = chunks.reset_after(life.keys[chunk]) if 0 <= chunk < len(life.keys) else 0
            if not reset and tail is not None and tail.first_token <= at < tail.end_token:
                reset = tail.before_reset
            if reset:
                admission.num_before_reset += until - at
                admission.reset_sequence = max(admission.reset_sequence, reset)

    @staticmethod
    def start_late(account: Account, admission: Admission, first_token: int) -> None:
        """Count the tokens between the claimed tokens and the beginning of the first step as `num_elsewhere`."""
        covered = admission.num_retained + admission.num_claimed
        first_token = min(first_token, admission.num_tokens)
        if first_token <= covered:
            return
        for span in within(admission.missed, covered, first_token):
            account.sums.missed[span.reason] -= span.num_tokens
        admission.num_elsewhere = first_token - covered
        account.sums.num_elsewhere += admission.num_elsewhere
        admission.missed = joined(
            Span(max(span.first_token, first_token), span.end_token, span.reason, span.evidence, span.fact)
            for span in admission.missed
        )

    # --- loads -----------------------------------------------------------------------------------

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        copy, loads = self._model.copies.current, self._memory.state.loads
        if copy is None:
            return
        self._memory.chunks.loaded(copy.keys)
        if not self._memory.is_kept(event.request_id):
            return
        life = self._model.lives.of(event.ordinal)
        account = self._memory.account(life)
        admission = None
        if account is not None:
            account.undelivered, admission = 0, account.admission
        if event.job_id in loads:
            return
        if admission is not None:
            admission.job_id = event.job_id
        ordinal = NEVER if account is None else event.ordinal
        loads[event.job_id] = Load(
            ordinal, 0 if admission is None else admission.sequence, event.first_token, event.num_tokens
        )
        sums = self._memory.state.ended if account is None else account.sums
        sums.num_to_load += event.num_tokens
        if life is not None and account is not None:
            self._count_duplicated(life, account, copy, event)

    def _count_duplicated(self, life: Life, account: Account, copy: Copy, event: e.LoadIssued) -> None:
        """Count the tokens of a load that another load in flight loads, too.

        If several loads overlap with this load, count the largest overlap.
        """
        copies = self._model.copies
        others = [other for job_id in sorted(copies.loads) if (other := copies.get(job_id)) and other is not copy]
        shared = (
            self._shared(life, other, event.first_token, event.first_token + event.num_tokens) for other in others
        )
        most = max(filter(None, shared), key=lambda each: each.end_token - each.first_token, default=None)
        if most is None:
            return
        sums, num_tokens = account.sums, most.end_token - most.first_token
        sums.num_duplicated += num_tokens
        key = life.keys[(most.end_token - 1) // self._chunk_size].hex()
        if key in sums.duplicated or len(sums.duplicated) < MAX_KEPT:
            sums.duplicated[key] += num_tokens
        if account.admission is not None:
            account.admission.duplicated = most

    def _shared(self, life: Life, load: Copy, first_token: int, end_token: int) -> SharedLoad | None:
        """Return the tokens of a life, in the given range, that `load` copies. None if there are none."""
        keys = life.keys
        brought = zip(load.chunks, load.keys, strict=False)
        shared = [chunk for chunk, key in brought if chunk < len(keys) and keys[chunk] == key]
        if not shared:
            return None
        first = max(shared[0] * self._chunk_size, first_token)
        end = min((shared[-1] + 1) * self._chunk_size, end_token)
        return SharedLoad(load.job_id, load.request_id, load.sequence, first, end) if first < end else None

    @on(e.LoadCompleted)
    def _load_completed(self, event: e.LoadCompleted) -> None:
        load = self._memory.state.loads.pop(event.job_id, None)
        if load is not None:
            account = self._settle(load, LoadFate.LOADED)
            admission = None if account is None else _admission_of(account, load)
            if admission is not None:
                admission.not_loaded = ()

    @on(e.LoadFailed)
    def _load_failed(self, event: e.LoadFailed) -> None:
        account, evidence = self._memory.decided(event), (self._moment.sequence, event.cause)
        if account is not None:
            account.tail, account.load_failed = None, evidence
        load = self._memory.state.loads.pop(event.job_id, None)
        if load is None:
            return
        loaded = self._settle(load, LoadFate.FAILED)
        if loaded is None:
            return
        admission = _admission_of(loaded, load)
        if admission is not None:
            self.note_not_loaded(loaded, admission, load, evidence)
            failed = Span(load.first_token, load.first_token + load.num_tokens, Reason.LOAD_FAILED, evidence)
            admission.spans = replaced(admission.spans, failed)
        if loaded.taken_back_reason is Reason.LOAD_FAILED and loaded.taken_back:
            self._prove(loaded, admission, evidence)

    def _settle(self, load: Load, fate: LoadFate) -> Account | None:
        """Count the tokens of a load under `fate`. Return the account of the load's life; None: the life has ended."""
        account = self._memory.account(self._model.lives.of(load.ordinal))
        sums = self._memory.state.ended if account is None else account.sums
        sums.to_load[fate] += load.num_tokens
        return account

    def _loads_of(self, life: Life) -> list[Load]:
        if life.ordinal == NEVER:
            return []
        return [load for load in self._memory.state.loads.values() if load.ordinal == life.ordinal]

    @staticmethod
    def _prove(account: Account, admission: Admission | None, evidence: tuple[int, ...]) -> None:
        """Make the failure of a load the proof for tokens that the scheduler took back before the failure's report."""
        supposed, account.taken_back = account.taken_back, evidence
        if admission is not None:
            admission.spans = joined(
                Span(span.first_token, span.end_token, span.reason, evidence) if span.evidence == supposed else span
                for span in admission.spans
            )

    def give_up_undelivered(self, account: Account) -> None:
        """Count claimed tokens as not delivered if no load was issued for them."""
        num_tokens, account.undelivered = account.undelivered, 0
        if not num_tokens:
            return
        account.sums.num_to_load += num_tokens
        account.sums.to_load[LoadFate.NOT_DELIVERED] += num_tokens
        if account.admission is not None:
            first = account.admission.num_retained
            evidence = tuple(filter(None, (account.broken_rule, account.undelivered_sequence)))
            undelivered = Span(first, first + num_tokens, Reason.NOT_DELIVERED, evidence)
            account.admission.spans = replaced(account.admission.spans, undelivered)
            account.admission.not_loaded = _claimed(account.admission, undelivered)
            account.never_computed = first, first + num_tokens


def _known(life: Life, first_token: int, end_token: int, chunk_size: int) -> range:
    """Return the numbers of the chunks of these tokens, up to the last chunk whose key is known.

    The token numbers in a log may be wrong and very large, so the known keys limit the result.
    """
    return range(max(0, first_token // chunk_size), min(-(-end_token // chunk_size), len(life.keys)))


def _claimed(admission: Admission, span: Span) -> _Spans:
    """Return `admission.not_loaded`, plus the tokens of `span` that the admission claimed."""
    first, end = admission.num_retained, admission.num_retained + admission.num_claimed
    clipped = attrs.evolve(span, first_token=max(first, span.first_token), end_token=min(end, span.end_token))
    return replaced(admission.not_loaded, clipped) if clipped.num_tokens > 0 else admission.not_loaded


def _admission_of(account: Account, load: Load) -> Admission | None:
    """Return the admission for which a load was issued; None if that admission is not kept."""
    entries = [account.admission] if account.history is None else account.history.admissions
    return next((entry for entry in reversed(entries) if entry is not None and entry.sequence == load.admission), None)


_ANSWER = attrgetter(*(name for name in e.LookupAnswered.__match_args__ if name != "cause"))


def is_same_answer(before: e.Event | None, event: e.LookupAnswered | e.LookupDeferred) -> bool:
    """Whether `event` repeats `before`: both are equal answers, or both are deferrals because of the same job."""
    if isinstance(event, e.LookupDeferred):
        return isinstance(before, e.LookupDeferred) and event.job_id == before.job_id
    return isinstance(before, e.LookupAnswered) and bool(_ANSWER(before) == _ANSWER(event))
