"""From steps and rollbacks to the tokens that are computed again, each with the reason it has from its admission."""

from __future__ import annotations

from kvledger.adapters.tools.reasons.admissions import Admissions
from kvledger.adapters.tools.reasons.life import Life
from kvledger.adapters.tools.reasons.lives import Lives
from kvledger.adapters.tools.reasons.reason import Reason
from kvledger.adapters.tools.reasons.request_history import Admission, Recomputation
from kvledger.adapters.tools.reasons.spans import Span, replaced, within
from kvledger.lifecycle import Projection, on
from kvledger.lifecycle import events as e


class Computing(Projection):
    """Folds what requests compute. Only counts in steps are used; steady decoding computes nothing again."""

    def __init__(self, lives: Lives, admissions: Admissions) -> None:
        self._lives = lives
        self._admissions = admissions

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled, sequence: int) -> None:
        for ordinal, num_computed_tokens, num_scheduled_tokens, num_tokens in event.advanced:
            life = self._lives.by_ordinal(ordinal)
            if life is not None:
                end = num_computed_tokens + num_scheduled_tokens
                self._advance(life, sequence, num_computed_tokens, end, num_tokens)

    def _advance(self, life: Life, sequence: int, first_token: int, end_token: int, num_tokens: int) -> None:
        admission = life.admission
        if not life.is_computing:
            self._admissions.give_up_undelivered(life)
            if admission is None:
                admission = self._admissions.admit_without_answer(life, sequence, first_token, num_tokens)
        if admission is not None and not admission.is_started:
            admission.is_started = True
            life.load_failed = ()
            if life.reset < admission.sequence:
                life.reset = 0  # what is computed from here on is not stale
            _explain_early_start(admission, sequence, first_token)
            self._admissions.start_late(life, admission, first_token)
        life.is_computing, life.allocated_without_answer = True, 0
        if life.num_preemptions:
            self._recompute(life, sequence, first_token, min(end_token, life.mark))
        self._compute_twice(life, sequence, max(first_token, life.mark), min(end_token, life.taken_back_from))
        life.computed_end = max(life.computed_end, end_token)
        if life.computed_end >= life.taken_back_from:
            life.taken_back_from = 0

    def _recompute(self, life: Life, sequence: int, first_token: int, end_token: int) -> None:
        num_tokens = end_token - first_token
        if num_tokens <= 0:
            return
        life.sums.num_recomputed += num_tokens
        spans = tuple(within(() if life.admission is None else life.admission.spans, first_token, end_token))
        for span in spans:
            life.sums.recomputed[span.reason] += span.num_tokens
        self._tell(life, sequence, spans, after_rollback=False)

    def _compute_twice(self, life: Life, sequence: int, first_token: int, end_token: int) -> None:
        if first_token < end_token:
            span = Span(first_token, end_token, life.taken_back_reason, life.taken_back)
            life.sums.computed_twice[span.reason] += span.num_tokens
            self._tell(life, sequence, (span,), after_rollback=True)

    @staticmethod
    def _tell(life: Life, sequence: int, spans: tuple[Span, ...], *, after_rollback: bool) -> None:
        if life.history is not None:
            life.history.keep(life.history.recomputations, Recomputation(sequence, spans, after_rollback))

    @on(e.TokensRolledBack)
    def _rolled_back(self, event: e.TokensRolledBack, sequence: int) -> None:
        life = self._lives.kept(event.request_id)
        if life is None:
            return
        if event.num_computed_tokens == 0:
            life.generation += 1
        admission = life.admission
        failed = life.load_failed
        if not failed and admission is not None and self._admissions.is_loading(admission):
            failed = (sequence,)  # the report of the load is still to come
        reason, evidence = (Reason.LOAD_FAILED, failed) if failed else (Reason.ROLLED_BACK, (sequence,))
        life.taken_back_from = max(life.taken_back_from, life.computed_end)
        life.taken_back_reason, life.taken_back = reason, evidence
        if admission is not None:
            known = [span for span in admission.spans if span.reason is Reason.LOAD_FAILED]
            end = max(life.computed_end, admission.num_retained + admission.num_claimed)
            spans = replaced(admission.spans, Span(event.num_computed_tokens, end, reason, evidence))
            for span in known:  # it proves more
                spans = replaced(spans, span)
            admission.spans = spans

    @on(e.HookFailed)
    def _hook_failed(self, event: e.HookFailed, sequence: int) -> None:
        if event.request_id:
            life = self._lives.kept(event.request_id)
            if life is not None:
                life.hook_failed = sequence
            return
        for life in self._lives:
            life.hook_failed = sequence


def _explain_early_start(admission: Admission, sequence: int, first_token: int) -> None:
    """A step that starts before what was admitted, without a word, computes those tokens for no known reason."""
    covered = admission.num_retained + admission.num_claimed
    if first_token < covered and not any(span.first_token <= first_token < covered for span in admission.spans):
        admission.spans = replaced(admission.spans, Span(first_token, covered, Reason.UNKNOWN, (sequence,)))
