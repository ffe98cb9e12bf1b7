"""LEGAL_TRANSITION: what happens to a request has a row in the tables, and what is decided follows its cause."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import Check, Moment
from kvledger.lifecycle.states import BlocksRegion, RequestState

_OF_NO_REQUEST = (e.ChunkEvicted, e.ChunkTainted, e.InvariantViolated, e.ExtensionStopped)
_OF_A_JOB = (e.LoadCompleted, e.LoadFailed, e.SaveCompleted, e.SaveFailed, e.TransferAwaited)


class LegalTransition:
    """No event happens in a state that has no row for it, and no decision is made but upon an observation.

    Verifies: every request event, observed or decided, and every request that a step schedules, has a row in phase and
    blocks for the states it was in, as the audit walks them; steps schedule requests that there are, and pause those
    that decode one token a step; a request id arrives again only when its earlier life is
    finished. The cause of every decision is the last observation before it.
    Does not verify: that what is believed live goes where the rows lead, which the reference machines show that every
    audit walks along; further observations about a request that is quarantined; reports of jobs of an earlier life of a
    request id (GEN_ISOLATION); and whether the tables themselves are right.
    """

    rule: ClassVar[str] = "LEGAL_TRANSITION"

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        return [
            (e.RequestArrived, self._arrived),
            (e.StepScheduled, self._step_scheduled),
            *(
                (event, self._look_at_decision if event.is_decision else self._look)
                for event in model.request_events
                if event is not e.RequestArrived
            ),
            *((event, self._look_at_cause) for event in _OF_NO_REQUEST),
        ]

    def _arrived(self, event: e.RequestArrived, moment: Moment) -> list[Violation] | None:
        if moment.is_legal:
            return None
        return [violation(self.rule, moment, f"{event.id} happened to a request in state {moment.state_before}")]

    def _step_scheduled(self, _event: e.StepScheduled, moment: Moment) -> list[Violation] | None:
        if not moment.refused_rows and not moment.rows_of_nobody:
            return None
        return [
            *(
                violation(self.rule, moment, f"a row of the step is about life {ordinal}, which it cannot be about")
                for ordinal in moment.rows_of_nobody
            ),
            *(
                violation(self.rule, moment, _detail("tokens.scheduled", state, blocks), request_id=life.request_id)
                for life, state, blocks in moment.refused_rows
                if not life.quarantined
            ),
        ]

    def _look(self, event: e.RequestEvent, moment: Moment) -> list[Violation] | None:
        return None if moment.is_legal else self._explain(event, moment)

    def _look_at_decision(self, event: Any, moment: Moment) -> list[Violation] | None:  # noqa: ANN401 -- of any class
        if event.cause == moment.cause:
            return None if moment.is_legal else self._explain(event, moment)
        return [*(self._look_at_cause(event, moment) or ()), *(self._look(event, moment) or ())]

    def _look_at_cause(self, event: Any, moment: Moment) -> list[Violation] | None:  # noqa: ANN401 -- of any class
        if event.cause == moment.cause or not moment.cause:
            return None
        detail = f"{event.id} names {event.cause} as its cause, but the last observation is {moment.cause}"
        return [violation(self.rule, moment, detail, moment.cause)]

    def _explain(self, event: e.RequestEvent, moment: Moment) -> list[Violation] | None:
        life = moment.life
        if isinstance(event, _OF_A_JOB) and (life is None or life.ordinal != event.ordinal):
            return None  # whatever became of its life
        if life is None:
            return [violation(self.rule, moment, f"{event.id} happened to an unknown request")]
        if not event.is_decision and life.quarantined:
            return None
        return [violation(self.rule, moment, _detail(event.id, moment.state_before, moment.blocks_before))]


def _detail(trigger: str, state: RequestState | None, blocks: BlocksRegion | None) -> str:
    return f"{trigger} happened to a request in state {state}, blocks {blocks}"
