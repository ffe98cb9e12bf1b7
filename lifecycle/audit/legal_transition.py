"""LEGAL_TRANSITION: what happens to a request is in the transition table, and leads where the table says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.machine import CompiledTable
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.replay import Check, ReplayedEvent
from kvledger.lifecycle.states import RequestState

_OF_A_JOB = (e.LoadCompleted, e.LoadFailed, e.SaveCompleted, e.SaveFailed, e.TransferAwaited)


class LegalTransition:
    """No event happens in a state that has no row for it.

    Verifies: every request event, observed or decided, has a row for the state its request was in; the request
    is then in the state the row names; a request id arrives again only when its earlier life is finished.
    Does not verify: reports of jobs of an earlier life of a request id (GEN_ISOLATION), and whether the table
    itself is right.
    """

    rule: ClassVar[str] = "LEGAL_TRANSITION"

    def __init__(self) -> None:
        self._table: CompiledTable = {}

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._table = model.core.table
        return [
            (e.RequestArrived, self._arrived),
            *(
                (event, _is_row_of(event, self._table, self._no_row))
                for event in model.core.request_events
                if event is not e.RequestArrived
            ),
        ]

    def _arrived(
        self, event: e.RequestArrived, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        if step.state_before is None or step.state_before is RequestState.FINISHED:
            return None
        return self._named(f"{event.id} happened to a request in state {step.state_before}", step, projections)

    def _named(self, detail: str, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        yield violation(self.rule, step, projections, detail)

    def _no_row(self, event: e.RequestEvent, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Look the pair up in the compiled table."""
        state = step.state_before
        record = projections.tracker.get(event.request_id)
        if isinstance(event, _OF_A_JOB) and (record is None or record.ordinal != event.ordinal):
            return  # whatever became of its life
        if state is None:
            yield violation(self.rule, step, projections, f"{event.id} happened to an unknown request")
            return
        dest = self._table.get((state, type(event)))
        if dest is None:
            yield violation(self.rule, step, projections, f"{event.id} happened to a request in state {state}")
        elif (
            step.state_after is not dest
            and step.state_after is not None
            and not (isinstance(event, e.RequestDecision) and projections.tracker.in_generation(event) is None)
        ):
            detail = f"{event.id} leads from {state} to {dest}, but the request is {step.state_after}"
            yield violation(self.rule, step, projections, detail)


def _is_row_of(event_class: type[e.RequestEvent], table: CompiledTable, no_row: Check) -> Check:
    """A check that is content where the request went as a row of the table says, and asks `no_row` elsewhere."""
    rows: dict[RequestState | None, RequestState] = {
        source: dest for (source, moving), dest in table.items() if moving is event_class
    }
    dest_of: Callable[[RequestState | None], RequestState | None] = rows.get

    def check(event: e.RequestEvent, step: ReplayedEvent, projections: Projections) -> object:
        before, after = step.state_before, step.state_after
        if after is not None and dest_of(before) is after:
            return None
        return None if after is None and before in rows else no_row(event, step, projections)

    return check
