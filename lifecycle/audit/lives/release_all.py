"""RELEASE_ALL: a finished request that owes nothing is released."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.jobs import JobsInFlight
from kvledger.lifecycle.audit.model.lives import Lives
from kvledger.lifecycle.audit.model.moment import Check, Moment
from kvledger.lifecycle.audit.model.start import Start
from kvledger.lifecycle.states import RequestState


class ReleaseAll:
    """A request that has ended and owes nothing is released, and nobody else is.

    Verifies: what is released is the present life of the id, in its generation, and no job of it is in flight; by the
    first step after its end, a request without jobs in flight has been released.
    Does not verify: that projections have forgotten it, which the tests of the projections do; what the adapter or the
    engine keeps.
    """

    rule: ClassVar[str] = "RELEASE_ALL"

    def __init__(self) -> None:
        self._jobs: JobsInFlight
        self._lives: Lives
        self._finished: dict[int, tuple[int, str]] = {}
        """Ordinal -> (sequence of the end, request id), until released."""

    def begin(self, start: Start) -> None:
        """Take over who has finished and is not released."""
        ended = (life for life in start.lives if life.state is RequestState.FINISHED)
        self._finished.update((life.ordinal, (0, life.request_id)) for life in ended)

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._jobs, self._lives = model.jobs, model.lives
        return [
            (e.RequestReleased, self._released),
            (e.RequestFinished, self._request_finished),
            (e.StepScheduled, self._step_scheduled),
        ]

    def _request_finished(self, event: e.RequestFinished, moment: Moment) -> None:
        if moment.life is not None:
            self._finished[moment.life.ordinal] = (moment.sequence, event.request_id)

    def _step_scheduled(self, _event: e.StepScheduled, moment: Moment) -> Iterator[Violation] | None:
        return self._check_overdue(moment) if self._finished else None

    def _released(self, event: e.RequestReleased, moment: Moment) -> list[Violation] | None:
        finished_at, _ = self._finished.pop(event.ordinal, (0, ""))
        left = self._lives.get(event.request_id)
        if left is not None:
            detail = f"generation {event.generation} of life {event.ordinal} is released, but there is {left.name}"
        elif self._jobs.owes(event.ordinal):
            jobs = [job.job_id for job in self._jobs.of_life(event.ordinal)]
            detail = f"released, but jobs {jobs} of it are in flight"
        else:
            return None
        return [violation(self.rule, moment, detail, finished_at, event.cause)]

    def _check_overdue(self, moment: Moment) -> Iterator[Violation]:
        for ordinal, (sequence, request_id) in list(self._finished.items()):
            if self._lives.of(ordinal) is None:
                del self._finished[ordinal]
            elif not self._jobs.owes(ordinal):
                del self._finished[ordinal]
                detail = "finished and owes no transfer, but was not released by the next step"
                yield violation(self.rule, moment, detail, sequence, request_id=request_id)
