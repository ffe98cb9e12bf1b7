"""LEGAL_TRANSITION: what happens to a request is in the transition table, and leads where the table says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import JOB_ISSUED, JOB_SETTLED, Violation, violation
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.machine import TABLE
from kvledger.lifecycle.projections.transfers import Job
from kvledger.lifecycle.replay import ReplayedEvent
from kvledger.lifecycle.states import RequestState


class LegalTransition:
    """No event happens in a state that has no row for it.

    Verifies: every request event, observed or decided, has a row for the state its request was in; the request
    is then in the state the row names; a request id arrives again only when its earlier life is finished.
    Does not verify: reports of jobs of an earlier life of a request id (GEN_ISOLATION), and whether the table
    itself is right.
    """

    rule: ClassVar[str] = "LEGAL_TRANSITION"
    looks_at: ClassVar[frozenset[type[e.Event]]] = frozenset(e.REQUEST_EVENTS)

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}

    def check(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Look the pair up in the compiled table."""
        event, state = step.event, step.state_before
        if not isinstance(event, e.RequestEvent):
            return
        if isinstance(event, e.RequestArrived):
            if state is not None and state is not RequestState.FINISHED:
                yield violation(self.rule, step, projections, f"{event.id} happened to a request in state {state}")
            return
        if self._is_of_an_earlier_life(event, projections):
            return
        if state is None:
            yield violation(self.rule, step, projections, f"{event.id} happened to an unknown request")
            return
        dest = TABLE.get((state, type(event)))
        if dest is None:
            yield violation(self.rule, step, projections, f"{event.id} happened to a request in state {state}")
        elif step.state_after is not dest and step.state_after is not None:
            record = projections.tracker.get(event.request_id)
            generation = getattr(event, "generation", None)
            if record is not None and generation in {None, record.generation}:
                detail = f"{event.id} leads from {state} to {dest}, but the request is {step.state_after}"
                yield violation(self.rule, step, projections, detail)

    def _is_of_an_earlier_life(self, event: e.RequestEvent, projections: Projections) -> bool:
        if isinstance(event, JOB_ISSUED):
            job = projections.transfers.get(event.job_id)  # type: ignore[attr-defined]
            if job is not None:
                self._jobs[job.job_id] = job
        elif isinstance(event, (*JOB_SETTLED, e.TransferAwaited)):
            job = self._jobs.get(event.job_id)  # type: ignore[attr-defined]
            if isinstance(event, JOB_SETTLED):
                self._jobs.pop(event.job_id, None)  # type: ignore[attr-defined]
            record = projections.tracker.get(event.request_id)
            return job is not None and (record is None or record.ordinal != job.ordinal)
        return False
