"""The accounts: a fold over a log that gives every missed and every recomputed token its reason.

For all requests (`stats`), or for one of them and with all that is to be told about it (`why`). The latter gives the
same result on the events that concern the request (`concerned.py`) as on the whole log. It is total: no event makes it
fail, also not behind a gap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.reasons.chunk_history import ChunkFact, ChunkHistory, ChunkStatus
from kvledger.lifecycle.reasons.explain import Explainer
from kvledger.lifecycle.reasons.life import UNBORN, Admission, Answer, Life, Tail
from kvledger.lifecycle.reasons.reason import Reason
from kvledger.lifecycle.reasons.spans import Span, joined, replaced, within
from kvledger.lifecycle.reasons.sums import LoadFate, OfferFate, Sums

__all__ = ["Accounts", "Admission", "Lookup", "Recomputation"]


@attrs.define
class Lookup:
    """Equal lookups in a row, told as one. `spans`: the tokens that the last of them left to compute, and why."""

    first_sequence: int
    last_sequence: int
    ordinal: int
    event: e.LookupAnswered | e.LookupDeferred
    spans: tuple[Span, ...]
    num_times: int = 1


@attrs.frozen
class Recomputation:
    """A step computed tokens again."""

    sequence: int
    ordinal: int
    spans: tuple[Span, ...]
    after_rollback: bool
    """Computed twice without a preemption."""


@attrs.frozen
class _Load:
    """A load in flight."""

    life: Life
    admission: Admission | None
    first_token: int
    num_tokens: int


class Accounts:
    """Feed it every event in order with `take`; `lose` where some are missing."""

    def __init__(
        self,
        configuration: LedgerConfiguration,
        *,
        request_id: str | None = None,
        keys: Container[bytes] | None = None,
        on_end: Callable[[Life], None] | None = None,
    ) -> None:
        """Start with nothing.

        Args:
            configuration: as in the log's header.
            request_id: the one request whose accounts are kept, with all there is to tell; None for all of them.
            keys: the chunks that are followed; None for all.
            on_end: told of each life of a request when it is over.
        """
        self._configuration = configuration
        self._only = request_id
        self._on_end = on_end
        self._history = ChunkHistory(keys)
        self._explainer = Explainer(configuration, self._history)
        self._lives: dict[str, Life] = {}
        self._by_ordinal: dict[int, Life] = {}
        self._loads: dict[int, _Load] = {}
        self._tails: dict[int, Life] = {}
        self._sums = Sums()
        self._hook_failed_for_all = 0
        self.lookups: list[Lookup] = []
        self.admissions: list[Admission] = []
        self.recomputations: list[Recomputation] = []
        """These three only where the accounts are those of one request."""
        self._folds: Mapping[type[e.Event], Callable[..., None]] = {
            e.RequestArrived: self._arrived,
            e.ChunkKeysObserved: self._keys_observed,
            e.LookupDeferred: self._deferred,
            e.LookupAnswered: self._answered,
            e.BlocksAllocated: self._allocated,
            e.LoadIssued: self._load_issued,
            e.LoadCompleted: self._load_completed,
            e.LoadFailed: self._load_failed,
            e.StepScheduled: self._step_scheduled,
            e.TokensRolledBack: self._rolled_back,
            e.RequestPreempted: self._preempted,
            e.SessionContinued: self._session_continued,
            e.RequestFinished: self._finished,
            e.RequestReleased: self._released,
            e.RequestQuarantined: self._quarantined,
            e.InvariantViolated: self._violated,
            e.HookFailed: self._hook_failed,
            e.PrefillAdvanced: self._progressed,
            e.PrefillCompleted: self._progressed,
            e.SaveIssued: self._save_issued,
            e.TailSaveIssued: self._tail_save_issued,
            e.SaveCompleted: self._save_completed,
            e.SaveFailed: self._save_failed,
            e.SaveDeclined: self._save_declined,
            e.ChunkEvicted: self._evicted,
            e.ChunkTainted: self._tainted,
            e.CacheReset: self._reset,
        }

    def take(self, sequence: int, event: e.Event) -> None:
        """Take up the next event."""
        fold = self._folds.get(type(event))
        if fold is not None:
            fold(event, sequence)

    def lose(self) -> None:
        """Events are missing here, or the log begins late: what was remembered cannot be relied upon."""
        self._history.forget()
        self._explainer.is_blind = True
        for life in self._lives.values():
            life.version += 1
            life.admission, life.tail = None, None
            self._settle_answer(life, OfferFate.LOST)

    def sums(self) -> Sums:
        """The sums so far, with what is still undecided as such."""
        sums = attrs.evolve(
            self._sums,
            missed=Counter(self._sums.missed),
            offered=Counter(self._sums.offered),
            to_load=Counter(self._sums.to_load),
            recomputed=Counter(self._sums.recomputed),
            computed_twice=Counter(self._sums.computed_twice),
        )
        for life in self._lives.values():
            if life.answer is not None:
                sums.offered[OfferFate.PENDING] += life.answer.event.num_external_tokens
            sums.num_to_load += life.undelivered
            sums.to_load[LoadFate.UNDER_WAY] += life.undelivered
        sums.to_load[LoadFate.UNDER_WAY] += sum(load.num_tokens for load in self._loads.values())
        return sums

    def lives(self) -> list[Life]:
        """The lives that are not over."""
        return list(self._lives.values())

    # --- lives ---------------------------------------------------------------------------------

    def _is_kept(self, request_id: str) -> bool:
        return self._only is None or request_id == self._only

    def _life(self, request_id: str) -> Life:
        life = self._lives.get(request_id)
        if life is None:
            life = self._lives[request_id] = Life(request_id)
        life.version += 1
        return life

    def _kept_life(self, request_id: str) -> Life | None:
        return self._life(request_id) if self._is_kept(request_id) else None

    def _arrived(self, event: e.RequestArrived, _sequence: int) -> None:
        self._end(event.request_id)
        life = self._life(event.request_id)
        life.num_prompt_tokens = event.num_prompt_tokens
        if self._is_kept(event.request_id):
            life.ordinal = event.ordinal
            self._by_ordinal[event.ordinal] = life

    def _finished(self, event: e.RequestFinished, _sequence: int) -> None:
        life = self._life(event.request_id)
        self._leave(life)
        life.tail = None
        size = self._configuration.chunk_size
        self._history.forget_known(
            (key for chunk, key in life.keys.items() if (chunk + 1) * size > event.num_settled_tokens),
            event.request_id,
        )

    def _released(self, event: e.RequestReleased, _sequence: int) -> None:
        life = self._lives.get(event.request_id)
        if life is not None and (life.ordinal == UNBORN or life.generation == event.generation):
            self._end(event.request_id)

    def _end(self, request_id: str) -> None:
        life = self._lives.pop(request_id, None)
        if life is None:
            return
        self._leave(life)
        if self._by_ordinal.get(life.ordinal) is life:
            del self._by_ordinal[life.ordinal]
        if self._on_end is not None and self._is_kept(request_id):
            self._on_end(life)

    def _leave(self, life: Life) -> None:
        self._settle_answer(life, OfferFate.WITHDRAWN)
        self._give_up_undelivered(life)
        life.admission, life.is_computing = None, False
        life.allocated_without_answer = 0

    # --- lookups and admissions ------------------------------------------------------------------

    def _deferred(self, event: e.LookupDeferred, sequence: int) -> None:
        life = self._kept_life(event.request_id)
        if life is None:
            return
        self._settle_answer(life, OfferFate.ASKED_AGAIN)
        first = life.deferrals[0] if life.deferrals and event.num_deferred > 1 else sequence
        life.deferrals = (first, sequence) if first != sequence else (sequence,)
        life.num_deferred = event.num_deferred
        life.is_computing = False
        self._tell_lookup(life, event, sequence, ())

    def _answered(self, event: e.LookupAnswered, sequence: int) -> None:
        life = self._kept_life(event.request_id)
        if life is None:
            return
        life.version -= 1  # a lookup changes nothing that the next one's reasons depend on
        before = life.answer
        self._settle_answer(life, OfferFate.ASKED_AGAIN)
        self._give_up_undelivered(life)
        self._sums.num_offered += event.num_external_tokens
        life.is_computing, life.allocated_without_answer = False, 0
        unchanged = (
            before is not None
            and (before.history_version, before.life_version) == (self._history.version, life.version)
            and attrs.evolve(before.event, cause=event.cause) == event
        )
        if before is not None and unchanged:
            spans = before.spans
        else:
            spans = self._explainer.explain(event, sequence, life)
        life.answer = Answer(sequence, event, spans, self._history.version, life.version)
        self._tell_lookup(life, event, sequence, spans)
        life.num_deferred = 0

    def _tell_lookup(
        self, life: Life, event: e.LookupAnswered | e.LookupDeferred, sequence: int, spans: tuple[Span, ...]
    ) -> None:
        if self._only is None:
            return
        last = self.lookups[-1] if self.lookups else None
        if last is not None and last.ordinal == life.ordinal and _is_same_lookup(last, event, spans):
            last.last_sequence, last.event, last.num_times = sequence, event, last.num_times + 1
        else:
            self.lookups.append(Lookup(sequence, sequence, life.ordinal, event, spans))

    def _settle_answer(self, life: Life, fate: OfferFate) -> None:
        if life.answer is not None:
            self._sums.offered[fate] += life.answer.event.num_external_tokens
            life.answer = None

    def _allocated(self, event: e.BlocksAllocated, sequence: int) -> None:
        life = self._kept_life(event.request_id)
        if life is None:
            return
        self._give_up_undelivered(life)
        if event.num_external_tokens > 0:
            life.undelivered, life.undelivered_sequence = event.num_external_tokens, sequence
        answer, life.answer = life.answer, None
        if answer is None:
            # The second phase of an asynchronous load and the next turn of a session are no admissions.
            if not life.is_computing and life.admission is None:
                life.allocated_without_answer = sequence
            return
        life.is_computing, life.load_failed = False, ()
        offered = answer.event.num_external_tokens
        num_taken_up = max(0, min(event.num_external_tokens, offered))
        self._sums.offered[OfferFate.TAKEN_UP] += num_taken_up
        self._sums.offered[OfferFate.NOT_TAKEN_UP] += offered - num_taken_up
        first = answer.event.num_computed_tokens
        refused = Span(first + num_taken_up, answer.offered_end, Reason.NOT_TAKEN_UP, (sequence, answer.sequence))
        num_retained = min(first, answer.event.num_tokens)
        missed = joined((refused, *answer.spans))
        self._admit(life, sequence, answer.sequence, num_retained, num_taken_up, missed)

    def _admit(
        self,
        life: Life,
        sequence: int,
        answer_sequence: int,
        num_retained: int,
        num_taken_up: int,
        missed: tuple[Span, ...],
    ) -> Admission:
        num_tokens = num_retained + num_taken_up + sum(span.num_tokens for span in missed)
        admission = life.admission = Admission(
            sequence,
            life.ordinal,
            answer_sequence,
            num_tokens,
            num_retained,
            num_taken_up,
            life.mark,
            missed,
            missed,
        )
        life.computed_end = 0
        sums = self._sums
        sums.num_admissions += 1
        sums.num_needed += num_tokens
        sums.num_retained += num_retained
        sums.num_taken_up += num_taken_up
        for span in missed:
            sums.missed[span.reason] += span.num_tokens
        if self._only is not None:
            self.admissions.append(admission)
        return admission

    # --- loads -----------------------------------------------------------------------------------

    def _load_issued(self, event: e.LoadIssued, _sequence: int) -> None:
        life = self._kept_life(event.request_id)
        if life is None:
            return
        life.undelivered = 0
        if event.job_id in self._loads:
            return
        if life.admission is not None:
            life.admission.job_id = event.job_id
        self._loads[event.job_id] = _Load(life, life.admission, event.first_token, event.num_tokens)
        self._sums.num_to_load += event.num_tokens

    def _load_completed(self, event: e.LoadCompleted, _sequence: int) -> None:
        load = self._loads.pop(event.job_id, None)
        if load is not None:
            self._sums.to_load[LoadFate.LOADED] += load.num_tokens

    def _load_failed(self, event: e.LoadFailed, sequence: int) -> None:
        life = self._lives.get(event.request_id)
        if life is not None and self._is_kept(event.request_id):
            life.version += 1
            life.tail = None
            life.load_failed = (sequence, event.cause)
        load = self._loads.pop(event.job_id, None)
        if load is None:
            return
        self._sums.to_load[LoadFate.FAILED] += load.num_tokens
        evidence = (sequence, event.cause)
        if load.admission is not None:
            failed = Span(load.first_token, load.first_token + load.num_tokens, Reason.LOAD_FAILED, evidence)
            load.admission.spans = replaced(load.admission.spans, failed)
        if load.life.taken_back_from:
            load.life.taken_back_reason, load.life.taken_back = Reason.LOAD_FAILED, evidence

    def _give_up_undelivered(self, life: Life) -> None:
        num_tokens, life.undelivered = life.undelivered, 0
        if not num_tokens:
            return
        self._sums.num_to_load += num_tokens
        self._sums.to_load[LoadFate.NOT_DELIVERED] += num_tokens
        admission = life.admission
        if admission is not None:
            first = admission.num_retained
            evidence = tuple(filter(None, (life.broken_rule, life.undelivered_sequence)))
            undelivered = Span(first, first + num_tokens, Reason.NOT_DELIVERED, evidence)
            admission.spans = replaced(admission.spans, undelivered)

    # --- steps -----------------------------------------------------------------------------------

    def _step_scheduled(self, event: e.StepScheduled, sequence: int) -> None:
        for ordinal, num_computed_tokens, num_scheduled_tokens, num_tokens in event.advanced:
            life = self._by_ordinal.get(ordinal)
            if life is not None:
                end = num_computed_tokens + num_scheduled_tokens
                self._advance(life, sequence, num_computed_tokens, end, num_tokens)

    def _advance(self, life: Life, sequence: int, first_token: int, end_token: int, num_tokens: int) -> None:
        life.version += 1
        admission = life.admission
        if life.undelivered and not life.is_computing:
            self._give_up_undelivered(life)
        if admission is None and not life.is_computing:
            admission = self._admit_without_answer(life, sequence, first_token, num_tokens)
        if admission is not None and not admission.is_started:
            admission.is_started = True
            life.reset = 0
            self._explain_late_start(admission, sequence, first_token)
        life.is_computing, life.allocated_without_answer = True, 0
        if life.num_preemptions:
            self._recompute(life, sequence, first_token, min(end_token, life.mark))
        self._compute_twice(life, sequence, max(first_token, life.mark), min(end_token, life.taken_back_from))
        life.computed_end = max(life.computed_end, end_token)
        if life.computed_end >= life.taken_back_from:
            life.taken_back_from = 0

    def _admit_without_answer(self, life: Life, sequence: int, first_token: int, num_tokens: int) -> Admission:
        reason = Reason.NO_LOOKUP
        life.hook_failed = life.hook_failed or self._hook_failed_for_all
        if self._explainer.is_blind:
            reason = Reason.UNKNOWN
        elif life.hook_failed:
            reason = Reason.HOOK_FAILED
        elif life.quarantined:
            reason = Reason.QUARANTINED
        missed = self._explainer.without_answer(first_token, num_tokens, sequence, life, reason=reason)
        at = life.allocated_without_answer or sequence
        admission = self._admit(life, at, 0, min(first_token, num_tokens), 0, missed)
        life.load_failed = ()
        return admission

    @staticmethod
    def _explain_late_start(admission: Admission, sequence: int, first_token: int) -> None:
        """A step that starts before what was admitted, without a word: those tokens are computed for no known reason."""
        covered = admission.num_retained + admission.num_taken_up
        if first_token < covered and not any(span.first_token <= first_token < covered for span in admission.spans):
            unknown = Span(first_token, covered, Reason.UNKNOWN, (sequence,))
            admission.spans = replaced(admission.spans, unknown)

    def _recompute(self, life: Life, sequence: int, first_token: int, end_token: int) -> None:
        num_tokens = max(0, end_token - first_token)
        if not num_tokens:
            return
        life.num_recomputed += num_tokens
        self._sums.num_recomputed += num_tokens
        spans = tuple(within(() if life.admission is None else life.admission.spans, first_token, end_token))
        for span in spans:
            self._sums.recomputed[span.reason] += span.num_tokens
        self._tell_recomputation(life, sequence, spans, after_rollback=False)

    def _compute_twice(self, life: Life, sequence: int, first_token: int, end_token: int) -> None:
        if first_token < end_token:
            span = Span(first_token, end_token, life.taken_back_reason, life.taken_back)
            self._sums.computed_twice[span.reason] += span.num_tokens
            self._tell_recomputation(life, sequence, (span,), after_rollback=True)

    def _tell_recomputation(self, life: Life, sequence: int, spans: tuple[Span, ...], *, after_rollback: bool) -> None:
        if self._only is not None:
            self.recomputations.append(Recomputation(sequence, life.ordinal, spans, after_rollback))

    def _rolled_back(self, event: e.TokensRolledBack, sequence: int) -> None:
        life = self._kept_life(event.request_id)
        if life is None:
            return
        if event.num_computed_tokens == 0:
            life.generation += 1
        failed = life.load_failed
        admission = life.admission
        if not failed and admission is not None and admission.job_id in self._loads:
            failed = (sequence,)  # the report of the load is still to come
        reason, evidence = (Reason.LOAD_FAILED, failed) if failed else (Reason.ROLLED_BACK, (sequence,))
        life.taken_back_from = max(life.taken_back_from, life.computed_end)
        life.taken_back_reason, life.taken_back = reason, evidence
        if admission is not None:
            end = max(life.computed_end, admission.num_retained + admission.num_taken_up)
            known = [span for span in admission.spans if span.reason is Reason.LOAD_FAILED]
            spans = replaced(admission.spans, Span(event.num_computed_tokens, end, reason, evidence))
            for span in known:
                spans = replaced(spans, span)
            admission.spans = spans

    # --- what happens to the request -------------------------------------------------------------

    def _preempted(self, event: e.RequestPreempted, sequence: int) -> None:
        life = self._kept_life(event.request_id)
        if life is None:
            return
        self._leave(life)
        life.mark = max(life.mark, event.num_settled_tokens)
        life.generation += 1
        life.num_preemptions += 1
        life.preempted = sequence
        life.tail, life.taken_back_from, life.computed_end = None, 0, 0
        life.deferrals, life.num_deferred = (), 0

    def _session_continued(self, event: e.SessionContinued, _sequence: int) -> None:
        life = self._life(event.request_id)
        first_chunk = event.num_computed_tokens // self._configuration.chunk_size
        life.keys = {chunk: key for chunk, key in life.keys.items() if chunk < first_chunk}
        if self._is_kept(event.request_id):
            self._leave(life)
            life.is_computing = True
            life.generation += 1
            life.mark = min(life.mark, event.num_computed_tokens)
            life.num_prompt_tokens = event.num_prompt_tokens
            life.tail, life.taken_back_from = None, 0
            life.computed_end = event.num_computed_tokens

    def _quarantined(self, event: e.RequestQuarantined, sequence: int) -> None:
        life = self._kept_life(event.request_id)
        if life is not None:
            life.quarantined = life.quarantined or (sequence, event.cause)
            life.tail = None

    def _violated(self, event: e.InvariantViolated, sequence: int) -> None:
        life = self._lives.get(event.request_id)
        if life is not None:
            life.broken_rule = sequence

    def _hook_failed(self, event: e.HookFailed, sequence: int) -> None:
        if not event.request_id:
            self._hook_failed_for_all = sequence
        elif self._is_kept(event.request_id):
            self._life(event.request_id).hook_failed = sequence

    def _progressed(self, event: e.PrefillAdvanced | e.PrefillCompleted, _sequence: int) -> None:
        life = self._lives.get(event.request_id)
        if life is not None and life.tail is not None:
            life.version += 1
            life.tail = None

    # --- chunks ----------------------------------------------------------------------------------

    def _keys_observed(self, event: e.ChunkKeysObserved, sequence: int) -> None:
        life = self._life(event.request_id)
        life.keys = {chunk: key for chunk, key in life.keys.items() if chunk < event.first_chunk}
        life.keys.update(enumerate(event.keys, event.first_chunk))
        self._history.known(event.keys, sequence, event.request_id, life.ordinal)

    def _save_issued(self, event: e.SaveIssued, sequence: int) -> None:
        life = self._life(event.request_id)
        fact = ChunkFact(ChunkStatus.SAVING, sequence, event.request_id, life.ordinal, event.job_id, cause=event.cause)
        self._history.save_issued((life.keys[chunk] for chunk in event.chunks if chunk in life.keys), fact)

    def _tail_save_issued(self, event: e.TailSaveIssued, sequence: int) -> None:
        life = self._kept_life(event.request_id)
        if life is not None:
            fact = ChunkFact(
                ChunkStatus.SAVING, sequence, event.request_id, life.ordinal, event.job_id, cause=event.cause
            )
            life.tail = Tail(event.first_token, event.first_token + event.num_tokens, fact)

    def _save_completed(self, event: e.SaveCompleted, sequence: int) -> None:
        self._history.save_settled(event.job_id, sequence, event.cause, None)
        self._settle_tail(event, sequence, ChunkStatus.SAVED, "")

    def _save_failed(self, event: e.SaveFailed, sequence: int) -> None:
        self._history.save_settled(event.job_id, sequence, event.cause, event.error)
        self._settle_tail(event, sequence, ChunkStatus.SAVE_FAILED, event.error)

    def _settle_tail(
        self, event: e.SaveCompleted | e.SaveFailed, sequence: int, status: ChunkStatus, error: str
    ) -> None:
        life = self._lives.get(event.request_id)
        tail = None if life is None else life.tail
        if life is not None and tail is not None and tail.fact.job_id == event.job_id:
            life.version += 1
            tail.fact = attrs.evolve(tail.fact, status=status, sequence=sequence, cause=event.cause, detail=error)

    def _save_declined(self, event: e.SaveDeclined, sequence: int) -> None:
        life = self._life(event.request_id)
        fact = ChunkFact(
            ChunkStatus.DECLINED,
            sequence,
            event.request_id,
            life.ordinal,
            detail=event.reason,
            cause=event.cause,
        )
        size = self._configuration.chunk_size
        if event.cause == life.preempted and event.first_chunk >= life.mark // size:
            life.tail = Tail(event.first_chunk * size, max(life.mark, event.first_chunk * size), fact)
            return
        chunks = sorted(chunk for chunk in life.keys if chunk >= event.first_chunk)
        self._history.declined((life.keys[chunk] for chunk in chunks), event.num_chunks, fact)

    def _evicted(self, event: e.ChunkEvicted, sequence: int) -> None:
        self._history.left(event.key, ChunkFact(ChunkStatus.EVICTED, sequence, event.for_request_id, cause=event.cause))

    def _tainted(self, event: e.ChunkTainted, sequence: int) -> None:
        self._history.left(event.key, ChunkFact(ChunkStatus.TAINTED, sequence, cause=event.cause))

    def _reset(self, _event: e.CacheReset, sequence: int) -> None:
        self._history.reset(sequence)
        for life in self._lives.values():
            life.version += 1
            if life.is_computing:
                life.reset = sequence
            if life.tail is not None:
                life.tail.fact = ChunkFact(ChunkStatus.RESET, sequence, cause=sequence, earlier=life.tail.fact)


def _is_same_lookup(last: Lookup, event: e.LookupAnswered | e.LookupDeferred, spans: tuple[Span, ...]) -> bool:
    """Whether only time passed between two lookups."""
    if isinstance(event, e.LookupAnswered) and isinstance(last.event, e.LookupAnswered):
        same = attrs.evolve(last.event, cause=event.cause) == event
        return same and _told(last.spans) == _told(spans)
    if isinstance(event, e.LookupDeferred) and isinstance(last.event, e.LookupDeferred):
        return attrs.evolve(last.event, cause=event.cause, num_deferred=event.num_deferred) == event
    return False


def _told(spans: tuple[Span, ...]) -> list[tuple[object, ...]]:
    return [(span.first_token, span.end_token, span.reason, span.fact) for span in spans]
