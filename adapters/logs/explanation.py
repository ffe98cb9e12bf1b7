"""The story of a request as a chain of causes: what happened, in order, and why, each in plain words.

What the log does not record is called an inference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import attrs

from kvledger.adapters.logs.amounts import plural
from kvledger.adapters.logs.describe import words
from kvledger.adapters.logs.reason_text import count_by_reason, reason_text, told_together
from kvledger.adapters.logs.stories import Told, Witness
from kvledger.adapters.reasons import Admission, Lookup, Reason, Recomputation, Span, Story
from kvledger.adapters.reasons.spans import joined
from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e


@attrs.define
class Cause:
    """One link of the chain. Times in nanoseconds since the log was opened."""

    what: str
    """`lookup`, `admission`, `recomputed`, `computed_twice`, or the id of an event."""
    sequence: int
    last_sequence: int
    time_ns: int
    text: str
    num_times: int = 1
    spans: tuple[Span, ...] = ()
    """The tokens that it is about, with their reasons."""
    reasons: list[str] = attrs.field(factory=list)
    """Those worth a line, in words."""
    evidence: tuple[int, ...] = ()
    notes: list[str] = attrs.field(factory=list)
    """What extensions add."""


class Chain:
    """Makes the causes of one life."""

    def __init__(self, story: Story, told: Told, core: Core, configuration: LedgerConfiguration) -> None:
        self._story = story
        self._told = told
        self._core = core
        self._configuration = configuration

    def causes(self) -> list[Cause]:
        """All of them, in the order of the log."""
        causes = [
            *self._moments(),
            *map(self._lookup, self._story.lookups),
            *map(self._admission, self._story.admissions),
        ]
        causes.sort(key=lambda cause: cause.last_sequence)
        self._add_evidence(causes)
        # What has no words is told by another cause.
        causes = [cause for cause in causes if cause.text or cause.notes]
        return _merged(causes, [self._recomputed(again) for again in self._story.recomputations])

    def _add_evidence(self, causes: Sequence[Cause]) -> None:
        """What extensions know besides."""
        known: list[tuple[int, e.Event]] = []
        for cause in causes:
            witness = self._told.witnesses.get(cause.last_sequence)
            if witness is None:
                continue
            known.append((witness.sequence, witness.event))
            for extension in self._core.extensions:
                with contextlib.suppress(Exception):  # somebody else's code; the causes stand without it
                    cause.notes += extension.evidence(tuple(known), self._configuration)

    # --- what happened to the request -------------------------------------------------------------

    def _moments(self) -> Iterator[Cause]:
        witnesses = [self._told.witnesses[number] for number in self._story.moments if number in self._told.witnesses]
        for index, witness in enumerate(witnesses):
            if not isinstance(witness.event, e.StepScheduled):
                yield self._moment(witness, witnesses[:index], witnesses[index + 1 :])

    def _moment(self, witness: Witness, before: Sequence[Witness], after: Sequence[Witness]) -> Cause:
        event = witness.event
        cause = Cause(event.id, witness.sequence, witness.sequence, witness.time_ns, self._words(event))
        if isinstance(event, e.RequestPreempted):
            step = next((other for other in after if isinstance(other.event, e.StepScheduled)), None)
            self._explain_preemption(cause, before, step)
        elif isinstance(event, e.RequestQuarantined):
            cause.evidence = (event.cause,)
            broken = next((other for other in reversed(before) if isinstance(other.event, e.InvariantViolated)), None)
            if broken is not None and getattr(broken.event, "cause", 0) == event.cause:
                cause.evidence = (event.cause, broken.sequence)
                cause.text += f", because rule {event.reason} was broken at event {event.cause}"
            else:
                cause.text += f", because of event {event.cause}"
        elif event.is_decision:
            cause.evidence = (getattr(event, "cause", 0),)
        return cause

    def _words(self, event: e.Event) -> str:
        text = words(event, self._core)
        return text if isinstance(event, e.ExtensionEvent) else text or event.id

    def _explain_preemption(self, cause: Cause, before: Sequence[Witness], step: Witness | None) -> None:
        last = before[-1] if before else None
        if last is not None and isinstance(last.event, e.CacheReset) and last.time_ns == cause.time_ns:
            cause.evidence = (last.sequence,)
            cause.text += f"; the cache was reset at event {last.sequence}: that this took its blocks is inferred"
            return
        if step is None or not isinstance(step.event, e.StepScheduled):
            cause.text += "; the log does not have the step for which its blocks were taken"
            return
        cause.evidence = (step.sequence,)
        event = step.event
        # Whoever is not told of decodes one token, so the step's sum tells how many there are.
        steady = event.num_scheduled_tokens - sum(scheduled for _, _, scheduled, _ in event.advanced)
        num_requests = len(event.advanced) + max(0, steady)
        ran = f"{plural(num_requests, 'request')} ran {plural(event.num_scheduled_tokens, 'token')}"
        others = [
            f"{self._told.names.get(ordinal) or f'number {ordinal}'} ({len(block_ids)})"
            for ordinal, block_ids in event.extended
            if ordinal != self._story.ordinal
        ]
        cause.text += f". In step {event.step} (event {step.sequence}) {ran}"
        if others:
            cause.text += (
                f", and blocks went to {', '.join(others)}: vLLM takes a running request's blocks when another needs "
                "one and none is free; that it was for these is inferred"
            )
        else:
            cause.text += (
                ", and nobody else got a block that the log tells of; a reset of the prefix cache, or a request that "
                "was preempted itself, looks like this (inferred)"
            )

    # --- lookups and admissions -------------------------------------------------------------------

    def _lookup(self, lookup: Lookup) -> Cause:
        witness = self._told.witnesses.get(lookup.last_sequence)
        text = "asked what can be loaded" if witness is None else words(witness.event, self._core)
        if lookup.num_times > 1:
            text += f" — {lookup.num_times} times"
        time_ns = 0 if witness is None else witness.time_ns
        cause = Cause("lookup", lookup.first_sequence, lookup.last_sequence, time_ns, text, lookup.num_times)
        cause.spans = lookup.spans
        cause.reasons = self._texts(lookup.spans, time_ns)
        return cause

    def _admission(self, admission: Admission) -> Cause:
        time_ns = self._told.time_ns(admission.sequence) or 0
        num_left = sum(span.num_tokens for span in admission.missed)
        parts = [f"{admission.num_retained} of them from vLLM's prefix cache"] if admission.num_retained else []
        parts += [f"{admission.num_taken_up} to be loaded"] if admission.num_taken_up else []
        parts += [f"{admission.num_elsewhere} from elsewhere"] if admission.num_elsewhere else []
        parts.append(f"{num_left} left to compute")
        text = f"admitted with {plural(admission.num_tokens, 'token')}: {', '.join(parts)}"
        cause = Cause("admission", admission.sequence, admission.sequence, time_ns, text, spans=admission.missed)
        cause.evidence = (admission.answer_sequence,) if admission.answer_sequence else ()
        # The lookup before has told the others already.
        new = [span for span in admission.missed if span.reason in _SINCE_ANSWER or not admission.answer_sequence]
        cause.reasons = self._texts(new, time_ns)
        return cause

    def _recomputed(self, again: Recomputation) -> Cause:
        time_ns = self._told.time_ns(again.sequence) or 0
        what = "computed_twice" if again.after_rollback else "recomputed"
        cause = Cause(what, again.sequence, again.sequence, time_ns, "", spans=again.spans)
        since_lookup = [span for span in again.spans if span.reason in _SINCE_LOOKUP]
        cause.reasons = self._texts(since_lookup, time_ns)
        return cause

    def _texts(self, spans: Sequence[Span], before_ns: int) -> list[str]:
        return [
            reason_text(group, self._told, self._configuration.chunk_size, before_ns) for group in told_together(spans)
        ]


_SINCE_ANSWER = frozenset({Reason.NOT_TAKEN_UP, Reason.WITHHELD})
"""What was offered, and why it was left."""
_SINCE_LOOKUP = frozenset({Reason.LOAD_FAILED, Reason.NOT_DELIVERED, Reason.ROLLED_BACK, Reason.UNKNOWN})
"""What a lookup cannot have told."""


def _merged(causes: Sequence[Cause], recomputed: Sequence[Cause]) -> list[Cause]:
    """Both in order; steps that go on computing again are one."""
    result: list[Cause] = []
    for cause in sorted((*causes, *recomputed), key=lambda cause: cause.last_sequence):
        last = result[-1] if result else None
        if last is not None and cause.what == last.what and cause.what in {"recomputed", "computed_twice"}:
            last.last_sequence = cause.last_sequence
            last.num_times += 1
            last.spans = joined((*last.spans, *cause.spans))
            last.reasons += [reason for reason in cause.reasons if reason not in last.reasons]
        else:
            result.append(cause)
    for cause in result:
        if cause.what in {"recomputed", "computed_twice"}:
            num_tokens = sum(span.num_tokens for span in cause.spans)
            steps = "" if cause.num_times == 1 else f" in {plural(cause.num_times, 'step')}"
            text = f"computed {plural(num_tokens, 'token')} again{steps}"
            rolled_back = " after a rollback" if cause.what == "computed_twice" else ""
            cause.text = f"{text}{rolled_back}: {count_by_reason(cause.spans)}"
    return result
