"""LEGAL_TRANSITION: what happens to a request has a row in the tables, and leads where they say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.events import trigger_of
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.replay import Check, ReplayedEvent
from kvledger.lifecycle.states import BlocksRegion, RequestState, TrustRegion

_OF_A_JOB = (e.LoadCompleted, e.LoadFailed, e.SaveCompleted, e.SaveFailed, e.TransferAwaited)


class LegalTransition:
    """No event happens in a state that has no row for it.

    Verifies: every request event, observed or decided, and every request that a step schedules, has a row in phase and
    blocks for the states it was in; it is then where the rows lead; a request id arrives again only when its earlier
    life is finished.
    Does not verify: further observations about a request that is quarantined; reports of jobs of an earlier life of a
    request id (GEN_ISOLATION); and whether the tables themselves are right.
    """

    rule: ClassVar[str] = "LEGAL_TRANSITION"

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        return [
            (e.RequestArrived, self._arrived),
            (e.StepScheduled, self._step_scheduled),
            *((event, self._look) for event in model.core.request_events if event is not e.RequestArrived),
        ]

    def _arrived(
        self, event: e.RequestArrived, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        if step.state_before is None or step.state_before is RequestState.FINISHED:
            return None
        detail = f"{event.id} happened to a request in state {step.state_before}"
        return iter([violation(self.rule, step, projections, detail)])

    def _step_scheduled(
        self, _event: e.StepScheduled, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        return self._of_rows(step, projections) if step.refused_rows else None

    def _of_rows(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        for ordinal, before in step.refused_rows.items():
            record = projections.tracker.of(ordinal)
            if record is not None and before.trust is TrustRegion.TRUSTED:
                detail = _detail("tokens.scheduled", before.state, before.blocks)
                yield violation(self.rule, step, projections, detail, request_id=record.request_id)

    def _look(self, event: e.RequestEvent, step: ReplayedEvent, projections: Projections) -> Iterator[Violation] | None:
        """Content where the request went as the tables say."""
        states, record = step.states_before, step.record
        dest = None if states is None else projections.core.compiled.legal[trigger_of(event)].get(states[:2])
        if dest is not None and (record is None or dest == (record.state, record.blocks)):
            return None
        return self._explain(event, step, projections)

    def _explain(self, event: e.RequestEvent, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        record, before = projections.tracker.get(event.request_id), step.states_before
        if isinstance(event, _OF_A_JOB) and (record is None or record.ordinal != event.ordinal):
            return  # whatever became of its life
        if before is None:
            yield violation(self.rule, step, projections, f"{event.id} happened to an unknown request")
            return
        dest = projections.core.compiled.legal[trigger_of(event)].get(before[:2])
        detail = _detail(event.id, *before[:2])
        if dest is None:
            if event.is_decision or before[-1] is TrustRegion.TRUSTED:
                yield violation(self.rule, step, projections, detail)
        elif record is not None and not (
            isinstance(event, e.RequestDecision) and projections.tracker.in_generation(event) is None
        ):
            after = f"state {record.state}, blocks {record.blocks}"
            detail = f"{detail}, and should lead to {dest[0]}, {dest[1]}, but the request is in {after}"
            yield violation(self.rule, step, projections, detail)


def _detail(trigger: str, state: RequestState, blocks: BlocksRegion) -> str:
    return f"{trigger} happened to a request in state {state}, blocks {blocks}"
