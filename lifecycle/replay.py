"""Replay: fold a stored log to the state at any event, and make every decision again.

Folding makes no decisions, because decisions are events too. Making the decisions again tests today's code against the
log. After a divergence, folding goes on with the recorded decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.divergences import Divergence, Divergences
from kvledger.lifecycle.events import (
    CORRUPT,
    Event,
    ExtensionStopped,
    HookFailed,
    LoadCompleted,
    LoadFailed,
    LookupDeferred,
    RequestArrived,
    RequestDecision,
    RequestEvent,
    RequestQuarantined,
    SaveCompleted,
    SaveFailed,
    TransferAwaited,
    TransferReported,
    trigger_of,
)
from kvledger.lifecycle.ledger import Decider, Deciding
from kvledger.lifecycle.machine import ReferenceMachine
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.base import Subject
from kvledger.lifecycle.projections.copies import Copy
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.table import State
from kvledger.lifecycle.turn import TurnEnded

SequencedEvent = tuple[int, Event]


def batches(events: Iterable[SequencedEvent], min_events: int = 1) -> Iterator[list[SequencedEvent]]:
    """Yield batches of at least `min_events` events; the last batch may be smaller.

    An observation and its decisions are in one batch.
    """
    batch: list[SequencedEvent] = []
    for sequence, event in events:
        if len(batch) >= min_events and not event.is_decision:
            yield batch
            batch = []
        batch.append((sequence, event))
    if batch:
        yield batch


def fold(
    core: Core,
    events: Iterable[SequencedEvent],
    configuration: LedgerConfiguration,
    *,
    at: int | None = None,
    start: Projections | None = None,
) -> Projections:
    """Return the state after the event with sequence number `at`, or after the last event if `at` is None.

    `start` is the state before the first event. It is changed in place. Default: the state of an empty log.
    """
    projections = core.new_projections(configuration) if start is None else start
    for sequence, event in events:
        if at is not None and sequence > at:
            break
        projections.fold(event, sequence)
    return projections


@attrs.define
class ReplayedEvent:
    """The event that a replay is folding or has last folded. A replay has one object of this class, and changes it."""

    sequence: int = 0
    event: Event | None = None
    cause: int = 0
    """Sequence number of the latest observation. It is the cause of each decision made now."""


_OF_A_JOB = {LookupDeferred, TransferAwaited, LoadCompleted, LoadFailed, SaveCompleted, SaveFailed}
_Standing = tuple[State, ...]
"""The states of a request or a job in all its regions."""


class Replay:
    """Folds events one by one, makes the decisions on them again, and compares states with the reference machine.

    Each decision is compared with the next event of the log, and that event is folded. After the first difference, the
    remaining recorded decisions on the same observation are folded, but not compared.

    Args:
        core: the core that decides and folds.
        configuration: the configuration of the log.
        reference: the reference machine; None: states are not compared.
        start: the state before the first event. It is changed in place. Default: the state of an empty log.
    """

    def __init__(
        self,
        core: Core,
        configuration: LedgerConfiguration,
        *,
        reference: ReferenceMachine | None = None,
        start: Projections | None = None,
    ) -> None:
        self.projections = core.new_projections(configuration) if start is None else start
        self._reference = reference
        self.divergences = Divergences()
        self.reference_differences = Divergences()
        self.current = ReplayedEvent()
        """The event that is folded now, or was folded last."""
        self._is_extended = bool(core.extensions)
        self._raised = self.projections.extensions.raised
        self.projections.extensions.on_raised = self._stop_extensions
        self._decider = Decider(core, self.projections, self._decided)
        self.num_events = 0
        self._events: Iterator[SequencedEvent] = iter(())
        self._read_ahead: SequencedEvent | None = None
        self._is_compared = False
        """Whether all decisions on the latest observation have been equal to the log so far."""
        self._stands_aside = False
        """Whether the log is past the event that made its ledger corrupt. From then on, nothing was decided."""
        self.missing: Divergence | None = None
        """A decision that was made after the last event so far. The next event shows whether the log lacks it."""
        self._error: Exception | None = None
        self._unjudged = core.unjudged
        self.num_unjudged = 0
        """Observations on which an absent extension may have decided."""

    def run(self, events: Iterable[SequencedEvent]) -> None:
        """Call `take` with all events, then `finish`."""
        self.take(events)
        self.finish()

    def take(self, events: Iterable[SequencedEvent]) -> None:
        """Fold events in log order, and make their decisions again. Pass an observation together with its decisions.

        Raises:
            Exception: a fold raised it at the event in `current`. Do not call `take` again.
        """
        self._events = iter(events)
        while (following := self._next()) is not None:
            self._take_up(*following)

    def finish(self) -> None:
        """Add a divergence if this code made one more decision after the last event. The log lacks that decision."""
        if self.missing is not None:
            self.divergences.append(self.missing)
            self.missing = None

    @property
    def is_at_rest(self) -> bool:
        """Whether another replay could continue with the folded state alone, if an observation comes next."""
        return self.missing is None and not self._stands_aside

    def _next(self) -> SequencedEvent | None:
        following, self._read_ahead = self._read_ahead, None
        return following or next(self._events, None)

    def _take_up(self, sequence: int, event: Event) -> None:
        if event.is_decision:
            self.missing = None
            if self._is_compared and not isinstance(event, ExtensionStopped):  # this code did not decide it
                self._diverged(sequence, event, None)
            self._fold(sequence, event)
            return
        if self.missing is not None:
            self.finish()
        self.current.cause = sequence
        if isinstance(event, HookFailed) and event.error.startswith(CORRUPT):
            self._stands_aside = True
        if self._stands_aside:
            self._is_compared = False
            self._fold(sequence, event)
            return
        deciding = self._decider.deciding[type(event)]
        is_unjudged = bool(self._unjudged) and self._is_unjudged(event)
        subject = self._fold(sequence, event)
        self._is_compared = True
        if is_unjudged:
            self._is_compared = False
            self.num_unjudged += 1
        elif deciding is not None or self._raised:
            self._decide_again(event, deciding, subject)

    def _decide_again(self, event: Event, deciding: Deciding | None, subject: Subject) -> None:
        try:
            if self._raised:
                self._stop_extensions()
            if deciding is not None:
                deciding(event, self.current.cause, subject)
        except TurnEnded:
            pass  # at a difference, or because a fold failed
        if self._error is not None:
            raise self._error

    def _is_unjudged(self, event: Event) -> bool:
        """Whether an `Absent` extension may have decided on the event in the state of the event's request."""
        record = self.projections.tracker.get(event.request_id) if isinstance(event, RequestEvent) else None
        state = None if record is None else record.state
        return not self._unjudged.isdisjoint(((type(event), None), (type(event), state)))

    def _decided(self, decision: Event) -> None:
        if not self._is_compared:  # the turn has ended, and a handler caught `TurnEnded`
            raise TurnEnded
        following = self._next()
        if following is None:
            self.missing = Divergence(self.current.sequence + 1, None, decision)
            self._is_compared = False
            raise TurnEnded
        sequence, event = following
        if decision != event:
            self._read_ahead = following
            self._diverged(sequence, event if event.is_decision else None, decision)
            raise TurnEnded
        try:
            self._fold(sequence, event)
        except Exception as error:
            self._error, self._is_compared = error, False
            raise TurnEnded from error
        if self._raised:
            self._stop_extensions()

    def _stop_extensions(self) -> None:
        """Decide to stop each extension whose code raised. The replay diverges if the log lacks this decision."""
        for decision in self.projections.extensions.stops(self.current.cause):
            self._decided(decision)

    def _diverged(self, sequence: int, recorded: Event | None, decided: Event | None) -> None:
        # Further decisions on this observation were made from another state, so they prove nothing.
        self._is_compared = False
        self.divergences.append(Divergence(sequence, recorded, decided))

    def _fold(self, sequence: int, event: Event) -> Subject:
        """Fold an event, compare the changed states with the reference machine, and return the event's subject."""
        self.num_events += 1
        self.current.sequence, self.current.event = sequence, event
        expected = [] if self._reference is None else self._expected(event, self._reference)
        subject = self.projections.fold(event, sequence)
        if any(_standing(moved) != states for moved, states in expected):
            self.reference_differences.append(Divergence(sequence, event, None))
        if self._is_extended and (following := self._next()) is not None:
            if isinstance(following[1], ExtensionStopped):  # even if its code does not raise here
                self._fold(*following)
            else:
                self._read_ahead = following
        return subject

    def _expected(
        self,
        event: Any,  # noqa: ANN401 -- of any class
        reference: ReferenceMachine,
    ) -> list[tuple[RequestRecord | Copy, _Standing]]:
        """Return (record, its states after the event by the reference machine) for each request or job of the event."""
        expected: list[tuple[RequestRecord | Copy, _Standing]] = []
        # An arrival has no row in the tables, even if it uses an id again.
        if isinstance(event, RequestEvent) and type(event) is not RequestArrived:
            record = self.projections.tracker.get(event.request_id)
            if record is not None:
                expected.append((record, _walked(reference, event, record)))
        job_ids = (event.job_id,) if type(event) in _OF_A_JOB else ()
        for job_id in event.job_ids if type(event) is TransferReported else job_ids:
            job = self.projections.jobs.get(job_id)
            if job is not None:
                expected.append((job, reference.after(trigger_of(event), _standing(job))[0]))
        return expected


def _standing(moved: RequestRecord | Copy) -> _Standing:
    return (moved.work, moved.source) if isinstance(moved, Copy) else moved.states


def _walked(reference: ReferenceMachine, event: RequestEvent, record: RequestRecord) -> _Standing:
    """Return the states to which the reference machine leads a request.

    A decision about an earlier life of the request id changes no state. A decision about another generation changes no
    state, except for a quarantine.
    """
    before, gating = record.states, reference.gating
    if isinstance(event, RequestDecision) and (
        event.ordinal != record.ordinal
        or (event.generation != record.generation and not isinstance(event, RequestQuarantined))
    ):
        return before
    after, is_legal = reference.after(trigger_of(event), before)
    if is_legal or event.is_decision or event.id in gating.never:
        return after
    return after if "tracker" in gating.closed_fold.get(event.id, ()) else before
