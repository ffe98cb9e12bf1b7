"""LIVENESS: every copy is reported; one that nobody speaks of is asked after, and given up if that does not help."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.indices import Indices
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import Check, ReplayedEvent


class _Job(msgspec.Struct, gc=False):
    sequence: int
    request_id: str
    since_step: int
    since_ns: int
    is_asked_after: bool = False


class Liveness:
    """No job stays unreported for longer than `max_silent_steps` and `max_silent_ms` without anything being done.

    Verifies: at each step, that a job which was overdue at the step before has been reported, asked after, or, where
    that had been done already, given up.
    Does not verify: jobs that were not overdue yet when the log ended. That a job was given up is under RECORDED.
    """

    rule: ClassVar[str] = "LIVENESS"

    def __init__(self) -> None:
        self._jobs: dict[int, _Job] = {}
        self._overdue: list[tuple[int, int]] = []
        """(job id, step since which it is silent) at the last step."""

    def begin(self, projections: Projections) -> None:
        """Take over the jobs in flight, since when they are silent, and which were overdue."""
        for job in projections.transfers:
            asked = _Job(0, job.request_id, job.asked_step, job.asked_ns, job.is_asked_after)
            self._jobs[job.job_id] = asked
        self._overdue = self._find_overdue(projections)

    def checks(self, _indices: Indices) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        return [
            (e.StepScheduled, self._step_scheduled),
            (e.LoadIssued, self._issued),
            (e.SaveIssued, self._issued),
            (e.TailSaveIssued, self._issued),
            (e.TransferAwaited, self._awaited),
            (e.LoadCompleted, self._settled),
            (e.LoadFailed, self._settled),
            (e.SaveCompleted, self._settled),
            (e.SaveFailed, self._settled),
        ]

    def _step_scheduled(
        self, _event: e.StepScheduled, step: ReplayedEvent, projections: Projections
    ) -> list[Violation] | None:
        return self._check_step(step, projections) if self._jobs else None

    def _issued(
        self, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued, step: ReplayedEvent, projections: Projections
    ) -> None:
        tracker = projections.tracker
        self._jobs[event.job_id] = _Job(step.sequence, event.request_id, tracker.num_steps, tracker.time_ns)

    def _awaited(self, event: e.TransferAwaited, _step: ReplayedEvent, projections: Projections) -> None:
        job = self._jobs.get(event.job_id)
        # Who was asked twice in vain is not asked a third time.
        if job is not None and (event.before_forward or not job.is_asked_after):
            job.since_step, job.since_ns = projections.tracker.num_steps, projections.tracker.time_ns
            job.is_asked_after |= not event.before_forward

    def _settled(
        self,
        event: e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed,
        _step: ReplayedEvent,
        _projections: Projections,
    ) -> None:
        self._jobs.pop(event.job_id, None)

    def _check_step(self, step: ReplayedEvent, projections: Projections) -> list[Violation] | None:
        found = [
            broken
            for job_id, since_step in self._overdue
            if (broken := self._check_overdue(job_id, since_step, step, projections)) is not None
        ]
        self._overdue = self._find_overdue(projections)
        return found or None

    def _find_overdue(self, projections: Projections) -> list[tuple[int, int]]:
        configuration, tracker = projections.configuration, projections.tracker
        overdue_step = tracker.num_steps - configuration.max_silent_steps
        overdue_ns = tracker.time_ns - configuration.max_silent_ms * 1_000_000
        return [
            (job_id, job.since_step)
            for job_id, job in self._jobs.items()
            if job.since_step < overdue_step and job.since_ns < overdue_ns
        ]

    def _check_overdue(
        self, job_id: int, since_step: int, step: ReplayedEvent, projections: Projections
    ) -> Violation | None:
        job = self._jobs.get(job_id)
        if job is None or job.since_step != since_step:
            return None
        del self._jobs[job_id]
        what = "asked after, and still not given up" if job.is_asked_after else "not asked after"
        detail = f"nobody has spoken of job {job_id} since step {since_step}, and it was {what}"
        return violation(self.rule, step, projections, detail, job.sequence, request_id=job.request_id)
