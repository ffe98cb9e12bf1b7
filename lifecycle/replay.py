"""Replay: fold a stored log into the state at any point, and decide everything again.

Folding needs no decision to be made: decisions are events too. Deciding again is the test of today's code
against what was recorded; the first divergence is reported, and folding goes on with what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import attrs

from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.decider import Decider
from kvledger.lifecycle.divergences import Divergence, Divergences
from kvledger.lifecycle.events import (
    Event,
    LoadIssued,
    RequestArrived,
    RequestEvent,
    RequestReleased,
    SaveIssued,
    StepScheduled,
    TailSaveIssued,
    field_names,
    trigger_of,
)
from kvledger.lifecycle.gate import Before, States, Walk, states_of
from kvledger.lifecycle.machine import ReferenceMachine
from kvledger.lifecycle.projections import Fold, Gated, Projections
from kvledger.lifecycle.projections.tracker import RequestRecord
from kvledger.lifecycle.projections.transfers import Job
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.turn import TurnEnded

SequencedEvent = tuple[int, Event]


def batches(events: Iterable[SequencedEvent], min_events: int = 1) -> Iterator[list[SequencedEvent]]:
    """The events in pieces of at least that many, none of which parts an observation from its decisions."""
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
    """The state after the event with sequence number `at`, or after the last one; from `start`, which is changed."""
    projections = Projections(core, configuration) if start is None else start
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
    states_before: States | None = None
    """Those of the event's request in all regions."""
    refused_rows: Mapping[int, Before] = attrs.field(factory=dict)
    """Of a step: ordinal -> what the request was before, where none can be scheduled."""
    state_before: RequestState | None = None
    state_after: RequestState | None = None
    record: RequestRecord | None = None
    """What is known about the event's request after the fold."""
    job: Job | None = None
    """The job in flight that the event issues, reports, asks after or settles."""


Check = Callable[[Any, ReplayedEvent, Projections], object]
"""Looks at one event after its fold; what it returns, if not None, goes to whoever asked for the check."""


Around = Callable[[int, Event], None]
"""Given (sequence number, event) where an event is to be folded."""


class _Plan(NamedTuple):
    """All that is done with the events of one class, looked up once."""

    is_request: bool
    changes_lives: bool
    """Whether the fold may put another record in the place of the request's, or none."""
    names_job: bool
    """Whether it is about a job that another event issued."""
    issues_job: bool
    folds: tuple[Fold, ...]
    gated: Gated | None
    walk: Walk | None
    """Where the reference machines of a request go."""
    checks: tuple[Check, ...]


class Replay:
    """Folds events one by one while deciding them again and walking the reference machine along.

    A decision that is made again is held against the next event of the log, which is folded in its stead. At the first
    difference the turn ends; what else was recorded upon this observation is folded and proves nothing.

    Args:
        checks: (event class, check) pairs, done in this order after the fold of such an event.
        on_found: given what a check returned.
        start: what is believed before the first event; it is folded on. Default: nothing.
    """

    def __init__(
        self,
        core: Core,
        configuration: LedgerConfiguration,
        *,
        reference: ReferenceMachine | None = None,
        checks: Iterable[tuple[type[Event], Check]] = (),
        on_found: Callable[[Any], None] = lambda _found: None,
        start: Projections | None = None,
    ) -> None:
        self.projections = Projections(core, configuration) if start is None else start
        self._reference = reference
        self.divergences = Divergences()
        self.reference_differences = Divergences()
        self.current = ReplayedEvent()
        """The event that is or was last taken up."""
        self._decider = Decider(core, self.projections, self._decided)
        self._on_found = on_found
        self.num_events = 0
        self._around: Around | None = None
        self._events: Iterator[SequencedEvent] = iter(())
        self._read_ahead: SequencedEvent | None = None
        self._is_compared = False
        """Whether all decisions upon the last observation have been equal so far."""
        self._missing: Divergence | None = None
        """A decision behind the last event: whether the log lacks it, the next event tells."""
        self._error: Exception | None = None
        self._unjudged = core.unjudged
        self.num_unjudged = 0
        """Observations upon which an extension may have decided whose code is not here."""
        checks_of: dict[type[Event], list[Check]] = {}
        for event_class, check in checks:
            checks_of.setdefault(event_class, []).append(check)
        self._plans = {
            event_class: self._plan(event_class, tuple(checks_of.get(event_class, ())), reference)
            for event_class in core.events.values()
        }

    def run(self, events: Iterable[SequencedEvent]) -> None:
        """Take up all events, then finish."""
        self.take(events)
        self.finish()

    def take(self, events: Iterable[SequencedEvent], around: Around | None = None) -> None:
        """Take up events in the order of the log; no observation may be parted from its decisions.

        Args:
            events: the next ones.
            around: is given each event in place of the fold, and folds it into `projections`.

        Raises:
            Exception: whatever a fold or a check raises; `current` says at which event. Nothing more can be taken up.
        """
        self._events, self._around = iter(events), around
        while (following := self._next()) is not None:
            self._take_up(*following)

    def finish(self) -> None:
        """Notice decisions that are missing at the end of the log."""
        if self._missing is not None:
            self.divergences.append(self._missing)
            self._missing = None

    def _next(self) -> SequencedEvent | None:
        following, self._read_ahead = self._read_ahead, None
        return following or next(self._events, None)

    def _take_up(self, sequence: int, event: Event) -> None:
        if event.is_decision:
            self._missing = None
            if self._is_compared:  # and nobody decides it any more
                self._diverged(sequence, event, None)
            self._fold(sequence, event)
            return
        self.finish()
        deciding = self._decider.deciding[type(event)]
        before = None if deciding is None else self._decider.before(event)
        if isinstance(event, StepScheduled) and isinstance(before, Mapping):
            self.current.refused_rows = before
        self._fold(sequence, event)
        self._is_compared = True
        if self._unjudged and not self._unjudged.isdisjoint(
            ((type(event), None), (type(event), self.current.state_before))
        ):
            self._is_compared = False
            self.num_unjudged += 1
        elif deciding is not None:
            with suppress(TurnEnded):
                deciding(event, sequence, before)
            if self._error is not None:
                raise self._error

    def _decided(self, decision: Event) -> None:
        if not self._is_compared:  # the turn has ended, and a handler took no notice
            raise TurnEnded
        following = self._next()
        if following is None:
            self._missing = Divergence(self.current.sequence + 1, None, decision)
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

    def _diverged(self, sequence: int, recorded: Event | None, decided: Event | None) -> None:
        # Further decisions upon this observation were made from another state; they prove nothing.
        self._is_compared = False
        self.divergences.append(Divergence(sequence, recorded, decided))

    # What an audit costs, so it is one function that makes nothing.
    def _fold(self, sequence: int, event: Any) -> None:  # noqa: ANN401, C901, PLR0912
        """Fold an event, walk the reference machine along, and look at it."""
        plan, step, projections = self._plans[type(event)], self.current, self.projections
        is_request, changes_lives, names_job, issues_job, folds, gated, walk, checks = plan
        self.num_events += 1
        step.sequence, step.event = sequence, event
        record_of, job_of = projections.tracker.get, projections.transfers.get
        job = expected = None
        if names_job:
            job = step.job = job_of(event.job_id)
            if job is not None and self._reference is not None:
                expected, _ = self._reference.after(trigger_of(event), (job.work, job.source))
        before = after = record = states = None
        if is_request:
            record = record_of(event.request_id)
            if record is not None:
                states = states_of(record)
                before = record.state
        if self._around is None:
            for fold in folds if gated is None or gated.accepts(event) else gated.closed:
                fold(event, sequence)
        else:
            self._around(sequence, event)
        if is_request:
            if changes_lives:
                record = record_of(event.request_id)
            if record is not None:
                after = record.state
                if (
                    walk is not None
                    and states is not None
                    and walk.known.get(states) != states_of(record)
                    and not walk.agrees(event, record, states)
                ):
                    self.reference_differences.append(Divergence(sequence, event, None))
            if issues_job:
                step.job = job_of(event.job_id)
        if job is not None and expected is not None and expected != (job.work, job.source):
            self.reference_differences.append(Divergence(sequence, event, None))
        step.record, step.states_before, step.state_before, step.state_after = record, states, before, after
        for check in checks:
            found = check(event, step, projections)
            if found is not None:
                self._on_found(found)

    def _plan(self, event_class: type[Event], checks: tuple[Check, ...], reference: ReferenceMachine | None) -> _Plan:
        walk = None
        # A birth is no row of the tables, also where an id is used again.
        if reference is not None and issubclass(event_class, RequestEvent) and event_class is not RequestArrived:
            walk = Walk(reference, event_class)
        issues_job = event_class in {LoadIssued, SaveIssued, TailSaveIssued}
        return _Plan(
            is_request=issubclass(event_class, RequestEvent),
            changes_lives=event_class in {RequestArrived, RequestReleased},
            names_job="job_id" in field_names(event_class) and not issues_job,
            issues_job=issues_job,
            folds=self.projections.folds_of(event_class),
            gated=self.projections.gated(event_class),
            walk=walk,
            checks=checks,
        )
