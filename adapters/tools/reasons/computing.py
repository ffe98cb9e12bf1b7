"""Finds in steps and rollbacks which tokens are computed again. Their reasons come from the request's admission."""

from __future__ import annotations

from kvledger.adapters.tools.reasons.admissions import Admissions
from kvledger.adapters.tools.reasons.memory import Account, Memory
from kvledger.adapters.tools.reasons.reason import Reason
from kvledger.adapters.tools.reasons.request_history import Admission, Recomputation
from kvledger.adapters.tools.reasons.spans import Span, joined, replaced, within
from kvledger.lifecycle import events as e
from kvledger.lifecycle import on
from kvledger.lifecycle.reader import Life


class Computing:
    """Part of `Accounts` that gets steps and rollbacks. Requests that a step does not list recompute no tokens."""

    def __init__(self, memory: Memory, admissions: Admissions) -> None:
        self._memory = memory
        self._lives, self._moment = memory.model.lives, memory.model.moment
        self._admissions = admissions

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        for ordinal, num_computed_tokens, num_scheduled_tokens, num_tokens in event.advanced:
            life = self._lives.of(ordinal)
            if life is not None and life.has_known_beginning:
                account = self._memory.account(life)
                if account is not None:
                    end = num_computed_tokens + num_scheduled_tokens
                    self._advance(life, account, num_computed_tokens, end, num_tokens)

    def _advance(self, life: Life, account: Account, first_token: int, end_token: int, num_tokens: int) -> None:
        admission, mark = account.admission, life.num_tokens_before_preemption
        if not account.is_computing:
            self._admissions.give_up_undelivered(account)
            if admission is None:
                admission = self._admissions.admit_without_answer(life, account, first_token, num_tokens)
        if admission is not None and not admission.is_started:
            admission.is_started = True
            account.started_at, account.load_failed = admission.sequence, ()
            _explain_early_start(admission, self._moment.sequence, first_token)
            self._admissions.start_late(account, admission, first_token)
        account.is_computing, account.allocated_without_answer = True, 0
        if life.num_preemptions:
            self._recompute(account, first_token, min(end_token, mark))
        self._compute_twice(account, max(first_token, mark), min(end_token, account.taken_back_from))
        first, end = account.never_computed
        if first_token <= first:
            account.never_computed = max(first, end_token), end
        elif end_token >= end:
            account.never_computed = first, min(end, first_token)
        account.computed_end = max(account.computed_end, end_token)
        if account.computed_end >= account.taken_back_from:
            account.taken_back_from = 0

    def _recompute(self, account: Account, first_token: int, end_token: int) -> None:
        num_tokens = end_token - first_token
        if num_tokens <= 0:
            return
        account.sums.num_recomputed += num_tokens
        spans = tuple(within(() if account.admission is None else account.admission.spans, first_token, end_token))
        for span in spans:
            account.sums.recomputed[span.reason] += span.num_tokens
        self._keep(account, spans, after_rollback=False)

    def _compute_twice(self, account: Account, first_token: int, end_token: int) -> None:
        first, end = account.never_computed
        ranges = [(first_token, end_token)]
        if first < end:
            ranges = [(first_token, min(end_token, first)), (max(first_token, end), end_token)]
        spans = joined(Span(*between, account.taken_back_reason, account.taken_back) for between in ranges)
        for span in spans:
            account.sums.computed_twice[span.reason] += span.num_tokens
        if spans:
            self._keep(account, spans, after_rollback=True)

    def _keep(self, account: Account, spans: tuple[Span, ...], *, after_rollback: bool) -> None:
        if account.history is not None:
            again = Recomputation(self._moment.sequence, spans, after_rollback)
            account.history.keep(account.history.recomputations, again)

    @on(e.TokensRolledBack)
    def _rolled_back(self, event: e.TokensRolledBack) -> None:
        account = self._memory.present(event.request_id)
        if account is None:
            return
        admission, sequence = account.admission, self._moment.sequence
        failed = account.load_failed
        load = None if admission is None else self._admissions.load_for(admission)
        if admission is not None and load is not None:  # the load has not been reported yet
            failed = failed or (sequence,)
            self._admissions.note_not_loaded(account, admission, load, failed)
        reason, evidence = (Reason.LOAD_FAILED, failed) if failed else (Reason.ROLLED_BACK, (sequence,))
        account.taken_back_from = max(account.taken_back_from, account.computed_end)
        account.taken_back_reason, account.taken_back = reason, evidence
        if admission is not None:
            known = [span for span in admission.spans if span.reason is Reason.LOAD_FAILED]
            end = max(account.computed_end, admission.num_retained + admission.num_claimed)
            spans = replaced(admission.spans, Span(event.num_computed_tokens, end, reason, evidence))
            for span in known:  # the report of a failure is the better proof
                spans = replaced(spans, span)
            admission.spans = spans

    @on(e.HookFailed)
    def _hook_failed(self, event: e.HookFailed) -> None:
        sequence = self._moment.sequence
        if not event.request_id:
            for _, account in self._memory.lives():
                account.hook_failed = sequence
        elif (account_of_one := self._memory.present(event.request_id)) is not None:
            account_of_one.hook_failed = sequence


def _explain_early_start(admission: Admission, sequence: int, first_token: int) -> None:
    """Give reason `UNKNOWN` to cached or claimed tokens that the first step computes, if no span begins among them."""
    covered = admission.num_retained + admission.num_claimed
    if first_token < covered and not any(span.first_token <= first_token < covered for span in admission.spans):
        admission.spans = replaced(admission.spans, Span(first_token, covered, Reason.UNKNOWN, (sequence,)))
