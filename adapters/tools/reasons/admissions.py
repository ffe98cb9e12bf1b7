"""From lookups to admissions: what was offered, claimed, loaded, and what was left to compute."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from kvledger.adapters.tools.reasons.explain import Explainer
from kvledger.adapters.tools.reasons.life import Answer, Life
from kvledger.adapters.tools.reasons.memory import Load, Loading, Memory
from kvledger.adapters.tools.reasons.reason import Reason
from kvledger.adapters.tools.reasons.request_history import MAX_KEPT, Admission, Lookup, SharedLoad
from kvledger.adapters.tools.reasons.spans import Span, joined, replaced, within
from kvledger.adapters.tools.reasons.sums import LoadFate, OfferFate, Sums
from kvledger.lifecycle import Projection, on
from kvledger.lifecycle import events as e

_Spans = tuple[Span, ...]


class Admissions(Projection):
    """Folds lookups, allocations and loads."""

    def __init__(self, memory: Memory, explainer: Explainer, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._memory, self._lives = memory, memory.lives
        self._explainer = explainer
        self._loads, self._loading = memory.state.loads, memory.state.loading

    def undecided(self, life: Life | None = None) -> Sums:
        """What is pending and under way, of one life or of all."""
        sums = Sums()
        for waiting in self._lives if life is None else (life,):
            if waiting.answer is not None:
                sums.offered[OfferFate.PENDING] += waiting.answer.event.num_external_tokens
            sums.num_to_load += waiting.undelivered
            sums.to_load[LoadFate.UNDER_WAY] += waiting.undelivered
        loads = self._loads.values() if life is None else self._loads_of(life)
        sums.to_load[LoadFate.UNDER_WAY] += sum(load.num_tokens for load in loads)
        return sums

    def is_loading(self, admission: Admission) -> bool:
        """Whether the admission's load has not been reported."""
        return admission.job_id in self._loads

    def leave(self, life: Life, fate: OfferFate = OfferFate.WITHDRAWN) -> None:
        """The request waits no more, and computes no more."""
        self._settle_answer(life, fate)
        self.give_up_undelivered(life)
        life.admission, life.is_computing = None, False
        life.allocated_without_answer = 0

    def end(self, life: Life) -> None:
        """The life is over; its loads may still be reported."""
        for load in self._loads_of(life):
            load.is_life_over = True

    # --- lookups ---------------------------------------------------------------------------------

    @on(e.LookupDeferred)
    def _deferred(self, event: e.LookupDeferred, sequence: int) -> None:
        life = self._lives.kept(event.request_id)
        if life is None:
            return
        life.withheld = 0
        self._settle_answer(life, OfferFate.ASKED_AGAIN)
        is_first = event.num_deferred <= 1 or not life.deferrals
        life.deferrals = (sequence,) if is_first else (life.deferrals[0], sequence)
        life.num_deferred = event.num_deferred
        life.is_computing = False
        self._note_lookup(life, event, sequence)

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered, sequence: int) -> None:
        life = self._lives.kept(event.request_id)
        if life is None:
            return
        life.withheld = 0
        life.sums.num_offered += event.num_external_tokens
        self._settle_answer(life, OfferFate.ASKED_AGAIN)
        self.give_up_undelivered(life)
        life.is_computing, life.allocated_without_answer, life.hook_failed = False, 0, 0
        life.answer = Answer(sequence, event)
        self._note_lookup(life, event, sequence)

    @on(e.DecisionWithheld)
    def _withheld(self, event: e.DecisionWithheld, sequence: int) -> None:
        life = self._lives.kept(event.request_id)
        if life is not None and not event.rule:  # a broken rule has a quarantine, which says more
            life.withheld = sequence

    def _settle_answer(self, life: Life, fate: OfferFate) -> None:
        if life.answer is not None:
            life.sums.offered[fate] += life.answer.event.num_external_tokens
            life.answer = None

    def _note_lookup(self, life: Life, event: e.LookupAnswered | e.LookupDeferred, sequence: int) -> None:
        """Keep it in the history, with its reasons; a waiting request is asked about at every step, mostly in vain."""
        before, life.last_lookup = life.last_lookup, event
        if life.history is None:
            return
        lookups = life.history.lookups
        if lookups and is_same_answer(before, event):
            lookups[-1].last_sequence, lookups[-1].num_times = sequence, lookups[-1].num_times + 1
            return
        spans = () if isinstance(event, e.LookupDeferred) else self._explainer.explain(event, sequence, life)
        awaited = None
        if isinstance(event, e.LookupDeferred) and (loading := self._loading.get(event.job_id)) is not None:
            first, end = self._shared(life.keys, loading, event.num_computed_tokens, event.num_tokens)
            if first < end:  # else it is another one's, where there is one load at a time
                awaited = SharedLoad(event.job_id, loading.request_id, loading.sequence, first, end)
        life.history.keep(lookups, Lookup(sequence, sequence, spans, awaited=awaited))

    # --- allocations -----------------------------------------------------------------------------

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated, sequence: int) -> None:
        life = self._lives.kept(event.request_id)
        if life is None:
            return
        self.give_up_undelivered(life)
        if event.num_external_tokens > 0:
            life.undelivered, life.undelivered_sequence = event.num_external_tokens, sequence
        answer, life.answer = life.answer, None
        if answer is None:
            # The second phase of an asynchronous load and the next turn of a session are no admissions.
            if not life.is_computing and life.admission is None:
                life.allocated_without_answer = sequence
            return
        life.is_computing, life.last_lookup = False, None
        offered = answer.event.num_external_tokens
        num_claimed = max(0, min(event.num_external_tokens, offered))
        life.sums.offered[OfferFate.CLAIMED] += num_claimed
        life.sums.offered[OfferFate.NOT_CLAIMED] += offered - num_claimed
        first = answer.event.num_computed_tokens
        reason, proof = (Reason.WITHHELD, life.withheld) if life.withheld else (Reason.NOT_CLAIMED, sequence)
        left = Span(first + num_claimed, first + offered, reason, (proof, answer.sequence))
        num_retained = min(first, answer.event.num_tokens)
        spans = self._explainer.explain(answer.event, answer.sequence, life)
        life.num_deferred = 0
        self.admit(life, sequence, answer.sequence, num_retained, num_claimed, joined((left, *spans)))

    def admit_without_answer(self, life: Life, sequence: int, first_token: int, num_tokens: int) -> Admission:
        """A step starts a request about which no lookup is in the log."""
        reason = Reason.NO_LOOKUP
        if self._memory.state.is_blind:
            reason = Reason.UNKNOWN
        elif life.hook_failed:
            reason = Reason.HOOK_FAILED
        elif life.quarantined:
            reason = Reason.QUARANTINED
        elif life.withheld:
            reason = Reason.WITHHELD
        at = life.allocated_without_answer or sequence
        missed = self._explainer.without_answer(first_token, num_tokens, at, life, reason=reason)
        return self.admit(life, at, 0, min(first_token, num_tokens), 0, missed)

    def admit(
        self,
        life: Life,
        sequence: int,
        answer_sequence: int,
        num_retained: int,
        num_claimed: int,
        missed: _Spans,
    ) -> Admission:
        """Count an admission."""
        num_tokens = num_retained + num_claimed + sum(span.num_tokens for span in missed)
        admission = life.admission = Admission(
            sequence, answer_sequence, num_tokens, num_retained, num_claimed, life.mark, missed, missed
        )
        self._date(admission, life)
        life.computed_end = 0
        sums = life.sums
        sums.num_admissions += 1
        sums.num_needed += num_tokens
        sums.num_retained += num_retained
        sums.num_claimed += num_claimed
        for span in missed:
            sums.missed[span.reason] += span.num_tokens
        if life.history is not None:
            life.history.keep(life.history.admissions, admission)
        return admission

    def _date(self, admission: Admission, life: Life) -> None:
        """Count what was computed before a reset of vLLM's prefix cache that spared the connector.

        That is what is claimed, and what vLLM's prefix cache has because another request loaded it.
        """
        size, chunks = self._explainer.configuration.chunk_size, self._memory.chunks
        if chunks.was_any_loaded_since_reset:
            for chunk in _known(life, 0, admission.num_retained, size):
                reset = chunks.reset_before_load(life.keys[chunk])
                if reset:
                    admission.num_retained_before_reset += min(size, admission.num_retained - chunk * size)
                    admission.reset_sequence = max(admission.reset_sequence, reset)
        tail = life.tail if life.tail is not None and life.tail.before_reset else None
        if tail is None and not chunks.is_any_from_before_reset:
            return
        first, end = admission.num_retained, admission.num_retained + admission.num_claimed
        of_tail = () if tail is None else range(tail.first_token // size, -(-tail.end_token // size))
        for chunk in sorted({*_known(life, first, end, size), *of_tail}):
            at, until = max(first, chunk * size), min(end, (chunk + 1) * size)
            if at >= until:
                continue
            reset = chunks.reset_after(life.keys[chunk]) if chunk in life.keys else 0
            if not reset and tail is not None and tail.first_token <= at < tail.end_token:
                reset = tail.before_reset
            if reset:
                admission.num_before_reset += until - at
                admission.reset_sequence = max(admission.reset_sequence, reset)

    @staticmethod
    def start_late(life: Life, admission: Admission, first_token: int) -> None:
        """The first step starts behind what was admitted: somebody else had brought these tokens."""
        covered = admission.num_retained + admission.num_claimed
        first_token = min(first_token, admission.num_tokens)
        if first_token <= covered:
            return
        for span in within(admission.missed, covered, first_token):
            life.sums.missed[span.reason] -= span.num_tokens
        admission.num_elsewhere = first_token - covered
        life.sums.num_elsewhere += admission.num_elsewhere
        admission.missed = joined(
            Span(max(span.first_token, first_token), span.end_token, span.reason, span.evidence, span.fact)
            for span in admission.missed
        )

    # --- loads -----------------------------------------------------------------------------------

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued, sequence: int) -> None:
        duplicated = self._note_loading(event, sequence)
        life = self._lives.kept(event.request_id)
        if life is None:
            return
        life.undelivered = 0
        if event.job_id in self._loads:
            return
        if life.admission is not None:
            life.admission.job_id = event.job_id
        admission = 0 if life.admission is None else life.admission.sequence
        self._loads[event.job_id] = Load(event.request_id, admission, event.first_token, event.num_tokens)
        life.sums.num_to_load += event.num_tokens
        if duplicated is not None:
            self._count_duplicated(life, duplicated)

    def _note_loading(self, event: e.LoadIssued, sequence: int) -> SharedLoad | None:
        """Remember what is being loaded; return the load that brings most of the same tokens, if there is one."""
        life, size = self._lives.get(event.request_id), self._chunk_size
        end_token = event.first_token + event.num_tokens
        known = () if life is None else _known(life, event.first_token, end_token, size)
        keys = {} if life is None else {chunk: life.keys[chunk] for chunk in known}
        most = None
        for job_id, other in self._loading.items():
            first, end = self._shared(keys, other, event.first_token, end_token)
            if end - first > (0 if most is None else most.end_token - most.first_token):
                most = SharedLoad(job_id, other.request_id, other.sequence, first, end)
        self._loading[event.job_id] = Loading(event.request_id, sequence, keys)
        self._memory.chunks.loaded(keys.values())
        return most

    def _shared(self, keys: Mapping[int, bytes], load: Loading, first_token: int, end_token: int) -> tuple[int, int]:
        """First and end of the tokens from `first_token` to `end_token` that the load brings, too; zeros if none."""
        shared = [chunk for chunk, key in load.keys.items() if keys.get(chunk) == key]
        if not shared:
            return 0, 0
        first = max(shared[0] * self._chunk_size, first_token)
        end = min((shared[-1] + 1) * self._chunk_size, end_token)
        return (first, end) if first < end else (0, 0)

    def _count_duplicated(self, life: Life, duplicated: SharedLoad) -> None:
        num_tokens = duplicated.end_token - duplicated.first_token
        life.sums.num_duplicated += num_tokens
        key = life.keys[(duplicated.end_token - 1) // self._chunk_size].hex()
        if key in life.sums.duplicated or len(life.sums.duplicated) < MAX_KEPT:
            life.sums.duplicated[key] += num_tokens
        if life.admission is not None:
            life.admission.duplicated = duplicated

    @on(e.LoadCompleted)
    def _load_completed(self, event: e.LoadCompleted, _sequence: int) -> None:
        self._loading.pop(event.job_id, None)
        load = self._loads.pop(event.job_id, None)
        if load is not None:
            self._settle(load, LoadFate.LOADED)

    @on(e.LoadFailed)
    def _load_failed(self, event: e.LoadFailed, sequence: int) -> None:
        self._loading.pop(event.job_id, None)
        life = self._lives.kept(event.request_id)
        evidence = (sequence, event.cause)
        if life is not None:
            life.tail, life.load_failed = None, evidence
        load = self._loads.pop(event.job_id, None)
        if load is None:
            return
        loaded = self._settle(load, LoadFate.FAILED)
        if loaded is None:
            return
        admission = _admission_of(loaded, load)
        if admission is not None:
            failed = Span(load.first_token, load.first_token + load.num_tokens, Reason.LOAD_FAILED, evidence)
            admission.spans = replaced(admission.spans, failed)
        if loaded.taken_back_reason is Reason.LOAD_FAILED and loaded.taken_back:
            self._prove(loaded, admission, evidence)

    def _settle(self, load: Load, fate: LoadFate) -> Life | None:
        """Count what became of a load; returns its life, unless that is over and its history is complete."""
        life = None if load.is_life_over else self._lives.get(load.request_id)
        sums = self._memory.state.ended if life is None else life.sums
        sums.to_load[fate] += load.num_tokens
        return life

    def _loads_of(self, life: Life) -> list[Load]:
        return [load for load in self._loads.values() if load.request_id == life.request_id and not load.is_life_over]

    @staticmethod
    def _prove(life: Life, admission: Admission | None, evidence: tuple[int, ...]) -> None:
        """The scheduler took tokens back before the failure was reported; that is the better proof."""
        supposed, life.taken_back = life.taken_back, evidence
        if admission is not None:
            admission.spans = joined(
                Span(span.first_token, span.end_token, span.reason, evidence) if span.evidence == supposed else span
                for span in admission.spans
            )

    def give_up_undelivered(self, life: Life) -> None:
        """Tokens were claimed and no load came of it."""
        num_tokens, life.undelivered = life.undelivered, 0
        if not num_tokens:
            return
        life.sums.num_to_load += num_tokens
        life.sums.to_load[LoadFate.NOT_DELIVERED] += num_tokens
        if life.admission is not None:
            first = life.admission.num_retained
            evidence = tuple(filter(None, (life.broken_rule, life.undelivered_sequence)))
            undelivered = Span(first, first + num_tokens, Reason.NOT_DELIVERED, evidence)
            life.admission.spans = replaced(life.admission.spans, undelivered)


def _known(life: Life, first_token: int, end_token: int, chunk_size: int) -> list[int]:
    """The chunks with these tokens whose keys are known, ascending.

    A log may count far more tokens than it has keys for.
    """
    chunks = range(max(0, first_token // chunk_size), -(-end_token // chunk_size))
    if len(chunks) <= len(life.keys):
        return [chunk for chunk in chunks if chunk in life.keys]
    return sorted(chunk for chunk in life.keys if chunk in chunks)


def _admission_of(life: Life, load: Load) -> Admission | None:
    """The one that a load is for, as long as it is kept."""
    entries = [life.admission] if life.history is None else life.history.admissions
    return next((entry for entry in reversed(entries) if entry is not None and entry.sequence == load.admission), None)


_ANSWER = attrgetter(*(name for name in e.LookupAnswered.__match_args__ if name != "cause"))


def is_same_answer(before: e.Event | None, event: e.LookupAnswered | e.LookupDeferred) -> bool:
    """Whether only time passed between two lookups."""
    if isinstance(event, e.LookupDeferred):
        return isinstance(before, e.LookupDeferred) and event.job_id == before.job_id
    return isinstance(before, e.LookupAnswered) and bool(_ANSWER(before) == _ANSWER(event))
