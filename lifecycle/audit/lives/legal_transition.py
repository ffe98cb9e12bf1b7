"""LEGAL_TRANSITION: what happens to a request has a row in the tables, and what is decided follows its cause."""

from __future__ import annotations

from typing import Any

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model.moment import EventChecks, on
from kvledger.lifecycle.states import BlocksRegion, RequestState

_OF_NO_REQUEST = (e.ChunkEvicted, e.ChunkTainted, e.InvariantViolated, e.ExtensionStopped)
_OF_A_JOB = (e.LoadCompleted, e.LoadFailed, e.SaveCompleted, e.SaveFailed, e.TransferAwaited)


class LegalTransition(Checker):
    """No event happens in a state that has no row for it, and no decision is made but upon an observation.

    Verifies: every request event, observed or decided, and every request that a step schedules, has a row in phase and
    blocks for the states it was in, as the audit walks them; steps schedule requests that there are, and pause those
    that decode one token a step; a request id arrives again only when its earlier life is
    finished. The cause of every decision is the last observation before it.
    Does not verify: that the live state goes where the rows lead, which the reference machines show that every
    audit walks along; further observations about a request that is quarantined; reports of jobs of an earlier life of a
    request id (GEN_ISOLATION); and whether the tables themselves are right.
    """

    rule = "LEGAL_TRANSITION"

    def checks(self) -> EventChecks:
        """Also those of every event of a request."""
        events = [event for event in self.model.request_events if event is not e.RequestArrived]
        of_requests = [(event, self._look_at_decision if event.is_decision else self._look) for event in events]
        return [*super().checks(), *of_requests]

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived) -> None:
        if not self.moment.is_legal:
            self.broken(f"{event.id} happened to a request in state {self.moment.state_before}")

    @on(e.StepScheduled)
    def _step_scheduled(self, _event: e.StepScheduled) -> None:
        for ordinal in self.moment.rows_of_nobody:
            self.broken(f"a row of the step is about life {ordinal}, which it cannot be about")
        for life, state, blocks in self.moment.refused_rows:
            if not life.quarantined:
                self.broken(_detail("tokens.scheduled", state, blocks), request_id=life.request_id)

    def _look(self, event: e.RequestEvent) -> None:
        if not self.moment.is_legal:
            self._explain(event)

    def _look_at_decision(self, event: Any) -> None:  # noqa: ANN401 -- of any class
        self._look_at_cause(event)
        if not self.moment.is_legal:
            self._explain(event)

    @on(*_OF_NO_REQUEST)
    def _look_at_cause(self, event: Any) -> None:  # noqa: ANN401 -- of any class
        if event.cause != self.moment.cause and self.moment.cause:
            detail = f"{event.id} names {event.cause} as its cause, but the last observation is {self.moment.cause}"
            self.broken(detail, self.moment.cause)

    def _explain(self, event: e.RequestEvent) -> None:
        life = self.moment.life
        if isinstance(event, _OF_A_JOB) and (life is None or life.ordinal != event.ordinal):
            return  # whatever became of its life
        if life is None:
            self.broken(f"{event.id} happened to an unknown request")
        elif event.is_decision or not life.quarantined:
            self.broken(_detail(event.id, self.moment.state_before, self.moment.blocks_before))


def _detail(trigger: str, state: RequestState | None, blocks: BlocksRegion | None) -> str:
    return f"{trigger} happened to a request in state {state}, blocks {blocks}"
