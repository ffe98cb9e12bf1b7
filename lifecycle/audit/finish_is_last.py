"""FINISH_IS_LAST: nothing new is started for a finished request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import ReplayedEvent
from kvledger.lifecycle.states import RequestState


class FinishIsLast:
    """After its end a request gets no load, no tail, and no save but the one that its end itself causes.

    Verifies: loads and tails for finished or released requests; saves for finished requests, by their cause.
    Does not verify: what the engine does with the request after its end.
    """

    rule: ClassVar[str] = "FINISH_IS_LAST"
    looks_at: ClassVar[frozenset[type[e.Event]]] = frozenset(
        {e.RequestArrived, e.RequestFinished, e.RequestReleased, e.LoadIssued, e.SaveIssued, e.TailSaveIssued}
    )

    def __init__(self) -> None:
        self._finished: dict[str, int] = {}

    def check(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Look at what starts after the end."""
        event = step.event
        if isinstance(event, e.RequestFinished):
            self._finished[event.request_id] = step.sequence
        elif isinstance(event, e.LoadIssued | e.SaveIssued | e.TailSaveIssued):
            if step.state_before not in {None, RequestState.FINISHED}:
                return
            finished_at = self._finished.get(event.request_id, 0)
            if not isinstance(event, e.SaveIssued) or event.cause != finished_at:
                detail = f"{event.id}, job {event.job_id}, after the request had finished"
                yield violation(self.rule, step, projections, detail, finished_at, event.cause)
        elif isinstance(event, e.RequestEvent):
            self._finished.pop(event.request_id, None)
