"""The gate: whether what was observed is legal in the states that its request is in; asked before the fold.

The ledger, a replay and whoever only folds ask the same tables, so that an illegal observation folds to the same
everywhere: to what the core's gating says. It must not know what a handler makes of the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from kvledger.lifecycle.events import (
    Event,
    RequestDecision,
    RequestEvent,
    RequestQuarantined,
    StepScheduled,
    trigger_of,
    triggers_of,
)
from kvledger.lifecycle.states import BlocksRegion, CurrentRegion, FirstRegion, RequestState, TrustRegion

if TYPE_CHECKING:
    from kvledger.lifecycle.core import Core
    from kvledger.lifecycle.machine import ReferenceMachine
    from kvledger.lifecycle.projections.tracker import RequestRecord, RequestTracker
    from kvledger.lifecycle.table import State


class Before(NamedTuple):
    """A request's generation and states before an observation was folded: what is lost is judged by these."""

    generation: int
    state: RequestState
    blocks: BlocksRegion
    first: FirstRegion
    current: CurrentRegion
    trust: TrustRegion

    @classmethod
    def of(cls, record: RequestRecord) -> Before:
        """As they are now."""
        return cls._make(fields_of(record))


States = tuple[RequestState, BlocksRegion, FirstRegion, CurrentRegion, TrustRegion]
"""Of a request, in the order of `table.REGIONS`."""
fields_of: Callable[[RequestRecord], tuple[Any, ...]] = attrgetter(*Before._fields)
"""Those of `Before.of`, faster."""
states_of: Callable[[RequestRecord], States] = attrgetter(*Before._fields[1:])
"""What a request is in now."""


class Gate:
    """Looks at records, changes nothing."""

    def __init__(self, core: Core, tracker: RequestTracker) -> None:
        self._regions = core.compiled
        self._never_refused = frozenset(core.gating.never)
        self._tracker = tracker
        scheduled = core.compiled.legal["tokens.scheduled"]
        self._not_scheduled = frozenset(
            state for state in RequestState for blocks in BlocksRegion if (state, blocks) not in scheduled
        )

    def accepts(self, event: RequestEvent) -> bool:
        """Whether the event's request is known, and in states that all have a row for it."""
        record = self._tracker.get(event.request_id)
        return record is not None and (record.state, record.blocks) in self._regions.legal[trigger_of(event)]

    def accepting(self, event_class: type[Event]) -> Callable[[RequestEvent], bool] | None:
        """How events of this class are judged; None for those that are folded in full whatever happens."""
        named = (trigger for trigger in triggers_of(event_class) if trigger in self._regions.legal)
        may_be_refused = any(len(self._regions.legal[each]) < len(self._regions.after[each]) for each in named)
        is_about_a_request = issubclass(event_class, RequestEvent) and not event_class.is_decision
        if not may_be_refused or not is_about_a_request or event_class.id in self._never_refused:
            return None
        if event_class.variants is not None:
            return self.accepts
        tracker, legal = self._tracker, self._regions.legal[event_class.id]

        def accepts(event: RequestEvent) -> bool:
            record = tracker.get(event.request_id)
            return record is not None and (record.state, record.blocks) in legal

        return accepts

    def refused_rows(self, step: StepScheduled) -> Mapping[int, Before]:
        """Ordinal -> states of requests that the step schedules where none can be scheduled."""
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
