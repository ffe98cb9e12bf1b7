"""LIVENESS: every copy is reported; one that no rank reports is asked after, and given up if that does not help."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import on


class Liveness(Checker):
    """No job stays unreported for longer than `max_silent_steps` and `max_silent_ms` without anything being done.

    Verifies: at each step, that a job which was overdue at the step before has been reported, asked after, or, where
    that had been done already, given up.
    Does not verify: jobs that were not overdue yet when the log ended. That a job was given up is under RECORDED.
    """

    rule = "LIVENESS"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._overdue: list[tuple[int, int]] = []
        """(job id, step since which it is silent) at the last step."""
        self._named: set[int] = set()
        """Jobs that were overdue twice and are in flight still: reported once."""
        self._silent_since = 0
        """No job is silent since an earlier step: who was issued or asked after since is not looked at before."""
        self._max_silent_steps = model.configuration.max_silent_steps
        self._max_silent_ns = model.configuration.max_silent_ms * 1_000_000

    @on(e.StepScheduled)
    def _step_scheduled(self, _event: e.StepScheduled) -> None:
        if self._overdue or self.lives.num_steps > self._silent_since + self._max_silent_steps:
            for job_id, since_step in self._overdue:
                self._check_overdue(job_id, since_step)
            self._overdue = self._find_overdue()

    def _find_overdue(self) -> list[tuple[int, int]]:
        lives = self.lives
        overdue_step = lives.num_steps - self._max_silent_steps
        overdue_ns = lives.time_ns - self._max_silent_ns
        jobs = list(self.jobs)
        self._silent_since = min([job.since_step for _, job in jobs], default=lives.num_steps)
        self._named.intersection_update([job_id for job_id, _ in jobs])
        return [
            (job_id, job.since_step)
            for job_id, job in jobs
            if job.since_step < overdue_step and job.since_ns < overdue_ns and job_id not in self._named
        ]

    def _check_overdue(self, job_id: int, since_step: int) -> None:
        job = self.jobs.get(job_id)
        if job is not None and job.since_step == since_step:
            self._named.add(job_id)
            what = "asked after, and still not given up" if job.is_asked_after else "not asked after"
            detail = f"nobody has spoken of job {job_id} since step {since_step}, and it was {what}"
            self.broken(detail, job.sequence, request_id=job.request_id)
