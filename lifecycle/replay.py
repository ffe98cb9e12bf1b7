"""Replay: fold a stored log into the state at any point, and decide everything again.

Folding needs no decision to be made: decisions are events too. Deciding again is the test of today's code
against what was recorded; the first divergence is reported, and folding goes on with what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any, NamedTuple

import attrs

from kvledger.lifecycle.belief import Fold, Projections
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.decider import Decide, Decider
from kvledger.lifecycle.decisions import NOTHING
from kvledger.lifecycle.divergences import Divergence, Divergences
from kvledger.lifecycle.events import (
    VOCABULARY,
    Event,
    LoadIssued,
    RequestArrived,
    RequestEvent,
    RequestReleased,
    SaveIssued,
    TailSaveIssued,
    field_names,
)
from kvledger.lifecycle.handlers import HandlerRegistry
from kvledger.lifecycle.machine import ReferenceMachine
from kvledger.lifecycle.projections.tracker import RequestRecord
from kvledger.lifecycle.projections.transfers import Job
from kvledger.lifecycle.states import RequestState

SequencedEvent = tuple[int, Event]


def fold(
    events: Iterable[SequencedEvent],
    configuration: LedgerConfiguration,
    *,
    at: int | None = None,
    start: Projections | None = None,
) -> Projections:
    """The state after the event with sequence number `at`, or after the last one; from `start`, which is changed."""
    projections = Projections(configuration) if start is None else start
    for sequence, event in events:
        if at is not None and sequence > at:
            break
        projections.fold(event, sequence)
    return projections


@attrs.define
class ReplayedEvent:
    """One event while it is replayed, with what checkers want to know about its moment.

    One object serves a whole replay, so that nothing is made for an event; whoever wants to keep something copies it.
    An attrs class, because setting a field of a struct costs more.
    """

    sequence: int = 0
    event: Event | None = None
    state_before: RequestState | None = None
    state_after: RequestState | None = None
    record: RequestRecord | None = None
    """What is known about the event's request after the fold."""
    job: Job | None = None
    """The job in flight that the event issues, reports, asks after or settles."""


Check = Callable[[Any, ReplayedEvent, Projections], object]
"""Looks at one event after its fold; what it returns, if not None, goes to whoever asked for the check."""


class _Plan(NamedTuple):
    """All that is done with the events of one class, looked up once."""

    is_decision: bool
    is_request: bool
    changes_lives: bool
    """Whether the fold may put another record in the place of the request's, or none."""
    names_job: bool
    """Whether it is about a job that another event issued."""
    issues_job: bool
    folds: tuple[Fold, ...]
    next_state: dict[RequestState, RequestState] | None
    """Where the reference machine goes, for events that are rows of the table."""
    decide: Decide | None
    checks: tuple[Check, ...]


class Replay:
    """Folds events one by one while deciding them again and walking the reference machine along.

    Args:
        checks: (event class, check) pairs, done in this order after the fold of such an event.
        on_found: given what a check returned.
        start: what is believed before the first event; it is folded on. Default: nothing.
    """

    def __init__(
        self,
        configuration: LedgerConfiguration,
        *,
        handlers: HandlerRegistry | None = None,
        reference: ReferenceMachine | None = None,
        checks: Iterable[tuple[type[Event], Check]] = (),
        on_found: Callable[[Any], None] = lambda _found: None,
        start: Projections | None = None,
    ) -> None:
        self.projections = Projections(configuration) if start is None else start
        self.divergences = Divergences()
        self.reference_differences = Divergences()
        self.current = ReplayedEvent()
        """The event that is or was last taken up."""
        self._decider = Decider(self.projections, handlers or HandlerRegistry())
        self._on_found = on_found
        self.num_events = 0
        self._expected: Iterator[Event] | None = None
        checks_of: dict[type[Event], list[Check]] = {}
        for event_class, check in checks:
            checks_of.setdefault(event_class, []).append(check)
        self._plans = {
            event_class: self._plan(event_class, tuple(checks_of.get(event_class, ())), reference)
            for event_class in VOCABULARY.values()
        }

    def step(self, sequence: int, event: Event) -> ReplayedEvent:
        """Take up the next event of the log, and tell about its moment."""
        self.take(((sequence, event),))
        return copy(self.current)

    def take(self, events: Iterable[SequencedEvent]) -> None:  # noqa: C901, PLR0912 -- a call per event would cost more
        """Take up events in the order of the log.

        This loop is what an audit costs, so it is one function that makes nothing: an event is folded, compared with
        what was decided again, followed on the reference machine and checked where it stands.
        """
        plans, projections, step = self._plans, self.projections, self.current
        record_of, job_of = projections.tracker.get, projections.transfers.get
        expected = self._expected
        num_events = 0
        try:
            event: Any
            for sequence, event in events:
                num_events += 1
                step.sequence, step.event = sequence, event
                is_decision, is_request, changes_lives, names_job, issues_job, folds, next_state, decide, checks = (
                    plans[type(event)]
                )
                if expected is not None:
                    decided = None if expected is NOTHING else next(expected, None)
                    if is_decision:
                        if decided != event:
                            self.divergences.append(Divergence(sequence, event, decided))
                            # Further decisions of this observation were made from another state; they prove nothing.
                            expected = None
                    elif decided is not None:
                        self.divergences.append(Divergence(sequence, None, decided))
                if names_job:
                    step.job = job_of(event.job_id)
                before: RequestState | None = None
                if is_request:
                    record = record_of(event.request_id)
                    if record is not None:
                        before = record.state
                    for fold in folds:
                        fold(event, sequence)
                    if changes_lives:
                        record = record_of(event.request_id)
                    step.record, step.state_before = record, before
                    if record is None:
                        step.state_after = None
                    else:
                        step.state_after = after = record.state
                        if (
                            next_state is not None
                            and before is not None
                            and after is not next_state[before]
                            and getattr(event, "generation", None) is None
                        ):
                            self.reference_differences.append(Divergence(sequence, event, None))
                    if issues_job:
                        step.job = job_of(event.job_id)
                else:
                    for fold in folds:
                        fold(event, sequence)
                    step.record = step.state_before = step.state_after = None
                if not is_decision:
                    expected = NOTHING if decide is None else decide(event, sequence, before) or NOTHING
                for check in checks:
                    found = check(event, step, projections)
                    if found is not None:
                        self._on_found(found)
        finally:
            self.num_events += num_events
            self._expected = expected

    def finish(self) -> None:
        """Notice decisions that are missing at the end of the log."""
        if self._expected is not None:
            decided = next(self._expected, None)
            if decided is not None:
                self.divergences.append(Divergence(self.current.sequence + 1, None, decided))
            self._expected = None

    def _plan(self, event_class: type[Event], checks: tuple[Check, ...], reference: ReferenceMachine | None) -> _Plan:
        next_state: dict[RequestState, RequestState] | None = None
        # A birth is no row of the table, also where an id is used again.
        if reference is not None and issubclass(event_class, RequestEvent) and event_class is not RequestArrived:
            next_state = {state: reference.next_state(state, event_class) or state for state in RequestState}
        issues_job = event_class in {LoadIssued, SaveIssued, TailSaveIssued}
        return _Plan(
            is_decision=event_class.is_decision,
            is_request=issubclass(event_class, RequestEvent),
            changes_lives=event_class in {RequestArrived, RequestReleased},
            names_job="job_id" in field_names(event_class) and not issues_job,
            issues_job=issues_job,
            folds=self.projections.folds_of(event_class),
            next_state=next_state,
            decide=self._decider.decider_of(event_class),
            checks=checks,
        )
