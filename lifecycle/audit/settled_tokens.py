"""How many tokens of each request were certainly written, as far as a log has told. The audit's own count."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import ReplayedEvent
from kvledger.lifecycle.states import RequestState

SETTLED_EVENTS: frozenset[type[e.Event]] = frozenset(
    {
        e.StepScheduled,
        e.RequestPreempted,
        e.RequestFinished,
        e.SessionContinued,
        e.TokensRolledBack,
        e.BlocksAllocated,
        e.RequestArrived,
        e.RequestReleased,
    }
)
"""What `SettledTokens.fold` wants to see."""


class SettledTokens:
    """Request id -> (number of settled tokens, sequence of the event that told)."""

    def __init__(self) -> None:
        self._settled: dict[str, tuple[int, int]] = {}

    def of(self, request_id: str) -> tuple[int, int]:
        """The count and who told it; zeros where nobody has."""
        return self._settled.get(request_id, (0, 0))

    def fold(self, step: ReplayedEvent, projections: Projections) -> None:
        """Take up one event; others than `SETTLED_EVENTS` change nothing."""
        event, sequence = step.event, step.sequence
        if isinstance(event, e.StepScheduled):
            for ordinal, _, num_settled_tokens in event.settled:
                record = projections.tracker.by_ordinal(ordinal)
                if record is not None:
                    self._settled[record.request_id] = (num_settled_tokens, sequence)
        elif isinstance(event, e.RequestPreempted):
            self._settled[event.request_id] = (event.num_settled_tokens, sequence)
        elif isinstance(event, e.RequestFinished):
            self._settled[event.request_id] = (min(event.num_settled_tokens, event.num_tokens - 1), sequence)
        elif isinstance(event, e.SessionContinued | e.TokensRolledBack):
            before, _ = self._settled.get(event.request_id, (0, 0))
            self._settled[event.request_id] = (min(before, event.num_computed_tokens), sequence)
        elif isinstance(event, e.RequestEvent) and self._begins_anew(step):
            self._settled.pop(event.request_id, None)

    @staticmethod
    def _begins_anew(step: ReplayedEvent) -> bool:
        """Whether nothing is written yet: blocks given after a preemption are others than those it had."""
        return not isinstance(step.event, e.BlocksAllocated) or step.state_before is RequestState.PREEMPTED
