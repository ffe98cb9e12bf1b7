"""FINISH_IS_LAST: nothing new is started for a finished request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.moment import Check, Moment
from kvledger.lifecycle.states import RequestState

_FINISHED = RequestState.FINISHED


class FinishIsLast:
    """After its end a request gets no load, no tail, and no save but the one that its end itself causes.

    Verifies: loads and tails for finished or released requests; saves for finished requests, by their cause.
    Does not verify: what the engine does with the request after its end.
    """

    rule: ClassVar[str] = "FINISH_IS_LAST"

    def __init__(self) -> None:
        self._finished: dict[str, int] = {}

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        model.forgotten.at(LIFE, self._finished)
        return [
            (e.RequestFinished, self._request_finished),
            (e.LoadIssued, self._issued),
            (e.SaveIssued, self._issued),
            (e.TailSaveIssued, self._issued),
        ]

    def _request_finished(self, event: e.RequestFinished, moment: Moment) -> None:
        self._finished[event.request_id] = moment.sequence

    def _issued(self, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued, moment: Moment) -> list[Violation] | None:
        """Look at what starts after the end."""
        before = moment.state_before
        if before is not None and before is not _FINISHED:
            return None
        finished_at = self._finished.get(event.request_id, 0)
        if isinstance(event, e.SaveIssued) and event.cause == finished_at:
            return None
        detail = f"{event.id}, job {event.job_id}, after the request had finished"
        return [violation(self.rule, moment, detail, finished_at, event.cause)]
