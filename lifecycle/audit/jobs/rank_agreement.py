"""RANK_AGREEMENT: what a job came to is decided when every rank has reported, and one failed rank fails it for all."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model.jobs import InFlight
from kvledger.lifecycle.audit.model.moment import on

_Settled = e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed


class RankAgreement(Checker):
    """A job is completed when every rank has done it and none failed; it is settled early by no single rank.

    Verifies: this for every settled job; that a job failed because of a report, and slots of a failed save that are
    used again, were reported by every rank: another one may still be copying. Once all have, slots are not kept.
    Does not verify: that every rank was given the same jobs; jobs given up because a rank did not report.
    """

    rule = "RANK_AGREEMENT"

    @on(e.LoadCompleted, e.SaveCompleted)
    def _completed(self, event: e.LoadCompleted | e.SaveCompleted) -> None:
        job = self.jobs.current
        if job is not None and len(job.ranks_done) != len(self.jobs.every_rank):
            self._disagreed(event, job)

    @on(e.LoadFailed)
    def _load_failed(self, event: e.LoadFailed) -> None:
        job = self.jobs.current
        if job is not None and event.cause == self.jobs.report_sequence and self._is_owing(job):
            self._disagreed(event, job)

    @on(e.SaveFailed)
    def _save_failed(self, event: e.SaveFailed) -> None:
        job = self.jobs.current
        if job is not None and event.quiet is self._is_owing(job):
            self._disagreed(event, job)

    def _is_owing(self, job: InFlight) -> bool:
        return bool(self.jobs.every_rank - job.ranks_done - job.ranks_failed)

    def _disagreed(self, event: _Settled, job: InFlight) -> None:
        detail = (
            f"{event.id} for job {event.job_id}, which {len(job.ranks_done)} of {len(self.jobs.every_rank)} ranks did "
            f"and {len(job.ranks_failed)} failed to do"
        )
        self.broken(detail, job.sequence, event.cause)
