"""The gate: whether an observation is legal in the states that its request is in; asked before the fold.

The ledger, a replay and readers that only fold ask the same tables, so an illegal observation folds to the same
everywhere: to what the core's gating says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvledger.lifecycle.events import (
    Event,
    RequestDecision,
    RequestEvent,
    RequestQuarantined,
    StepScheduled,
    trigger_of,
    triggers_of,
)
from kvledger.lifecycle.states import BlocksRegion, RequestState
from kvledger.lifecycle.subject import NOBODY, Before, Subject, states_of

if TYPE_CHECKING:
    from kvledger.lifecycle.core import Core
    from kvledger.lifecycle.machine import ReferenceMachine
    from kvledger.lifecycle.projections.request_record import RequestRecord
    from kvledger.lifecycle.projections.tracker import RequestTracker
    from kvledger.lifecycle.table import State

Find = Callable[[Any], Subject]
"""Returns the subject of an event of one class, before the event is folded."""
_UNKNOWN = Subject(is_refused=True)


class Gate:
    """Finds whom an event is about, and judges observations. Changes nothing."""

    def __init__(self, core: Core, tracker: RequestTracker) -> None:
        self._regions = core.compiled
        self._never_refused = frozenset(core.gating.never)
        self._tracker = tracker
        scheduled = core.compiled.legal["tokens.scheduled"]
        self._not_scheduled = frozenset(
            state for state in RequestState for blocks in BlocksRegion if (state, blocks) not in scheduled
        )

    def may_refuse(self, event_class: type[Event]) -> bool:
        """Whether events of this class may be refused; others are folded in full whatever happens."""
        named = (trigger for trigger in triggers_of(event_class) if trigger in self._regions.legal)
        may_be_illegal = any(len(self._regions.legal[each]) < len(self._regions.after[each]) for each in named)
        is_about_a_request = issubclass(event_class, RequestEvent) and not event_class.is_decision
        return may_be_illegal and is_about_a_request and event_class.id not in self._never_refused

    def finder(self, event_class: type[Event]) -> Find:
        """How the subject of events of this class is found."""
        tracker, legal = self._tracker, self._regions.legal
        if issubclass(event_class, RequestDecision):

            def decided(event: RequestDecision) -> Subject:
                request = tracker.of(event.ordinal)
                if request is None:
                    return NOBODY
                return Subject(request, None, request.generation == event.generation)

            return decided
        if not issubclass(event_class, RequestEvent):
            return lambda _event: NOBODY
        if not self.may_refuse(event_class):

            def observed(event: RequestEvent) -> Subject:
                request = tracker.get(event.request_id)
                return NOBODY if request is None else Subject(request, Before.of(request), True)  # noqa: FBT003

            return observed

        def gated(event: RequestEvent) -> Subject:
            request = tracker.get(event.request_id)
            if request is None:
                return _UNKNOWN
            is_refused = (request.state, request.blocks) not in legal[trigger_of(event)]
            return Subject(request, Before.of(request), True, is_refused)  # noqa: FBT003

        return gated

    def refused_rows(self, step: StepScheduled) -> Mapping[int, Before]:
        """Ordinal → states of requests that the step schedules where none can be scheduled."""
        record_of, not_scheduled = self._tracker.of, self._not_scheduled
        refused: dict[int, Before] = {}
        for row in step.advanced:
            record = record_of(row[0])
            if (
                record is not None
                and record.state in not_scheduled
                and (record.state, record.blocks) not in self._regions.legal["tokens.scheduled"]
            ):
                refused[row[0]] = Before.of(record)
        return refused


def walked(reference: ReferenceMachine, event: RequestEvent, record: RequestRecord) -> tuple[State, ...]:
    """Where the reference machines lead a request. Of a decision about another life nothing is to move."""
    before, gating = states_of(record), reference.gating
    if isinstance(event, RequestDecision) and (
        event.ordinal != record.ordinal
        or (event.generation != record.generation and not isinstance(event, RequestQuarantined))
    ):
        return before
    after, is_legal = reference.after(trigger_of(event), before)
    if is_legal or event.is_decision or event.id in gating.never:
        return after
    return after if "tracker" in gating.closed_fold.get(event.id, ()) else before
