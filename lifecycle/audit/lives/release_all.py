"""RELEASE_ALL: a finished request that owes nothing is released."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import on
from kvledger.lifecycle.audit.model.start import Start
from kvledger.lifecycle.states import RequestState


class ReleaseAll(Checker):
    """A request that has ended and owes nothing is released, and nobody else is.

    Verifies: what is released is the present life of the id, in its generation, and no job of it is in flight; by the
    first step after its end, a request without jobs in flight has been released.
    Does not verify: that projections have forgotten it, which the tests of the projections do; what the adapter or the
    engine keeps.
    """

    rule = "RELEASE_ALL"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._finished: dict[int, tuple[int, str]] = {}
        """Ordinal -> (sequence of the end, request id), until released."""

    def begin(self, start: Start) -> None:
        """Take over who has finished and is not released."""
        ended = (life for life in start.lives if life.state is RequestState.FINISHED)
        self._finished.update((life.ordinal, (0, life.request_id)) for life in ended)

    @on(e.RequestFinished)
    def _request_finished(self, event: e.RequestFinished) -> None:
        if self.moment.life is not None:
            self._finished[self.moment.life.ordinal] = (self.moment.sequence, event.request_id)

    @on(e.StepScheduled)
    def _step_scheduled(self, _event: e.StepScheduled) -> None:
        if self._finished:
            self._check_overdue()

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased) -> None:
        finished_at, _ = self._finished.pop(event.ordinal, (0, ""))
        left = self.lives.get(event.request_id)
        if left is not None:
            detail = f"generation {event.generation} of life {event.ordinal} is released, but there is {left.name}"
        elif self.jobs.owes(event.ordinal):
            jobs = [job.job_id for job in self.jobs.of_life(event.ordinal)]
            detail = f"released, but jobs {jobs} of it are in flight"
        else:
            return
        self.broken(detail, finished_at, event.cause)

    def _check_overdue(self) -> None:
        for ordinal, (sequence, request_id) in list(self._finished.items()):
            if self.lives.of(ordinal) is None:
                del self._finished[ordinal]
            elif not self.jobs.owes(ordinal):
                del self._finished[ordinal]
                detail = "finished and owes no transfer, but was not released by the next step"
                self.broken(detail, sequence, request_id=request_id)
