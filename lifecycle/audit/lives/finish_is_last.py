"""FINISH_IS_LAST: nothing new is started for a finished request."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.moment import on
from kvledger.lifecycle.states import RequestState

_FINISHED = RequestState.FINISHED


class FinishIsLast(Checker):
    """After its end a request gets no load, no tail, and no save but the one that its end itself causes.

    Verifies: loads and tails for finished or released requests; saves for finished requests, by their cause.
    Does not verify: what the engine does with the request after its end.
    """

    rule = "FINISH_IS_LAST"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._finished: dict[str, int] = {}
        model.forgotten.at(LIFE, self._finished)

    @on(e.RequestFinished)
    def _request_finished(self, event: e.RequestFinished) -> None:
        self._finished[event.request_id] = self.moment.sequence

    @on(e.LoadIssued, e.SaveIssued, e.TailSaveIssued)
    def _issued(self, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued) -> None:
        """Look at what starts after the end."""
        before = self.moment.state_before
        if before is not None and before is not _FINISHED:
            return
        finished_at = self._finished.get(event.request_id, 0)
        if isinstance(event, e.SaveIssued) and event.cause == finished_at:
            return
        detail = f"{event.id}, job {event.job_id}, after the request had finished"
        self.broken(detail, finished_at, event.cause)
