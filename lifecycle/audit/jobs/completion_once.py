"""COMPLETION_ONCE: each rank reports a job once, and a job is settled once."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model.moment import on

_Settled = e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed


class CompletionOnce(Checker):
    """Every job is issued once, reported at most once by each rank, and settled once.

    Verifies: reports are of jobs in flight, or of saves that were given up, by ranks that have not reported them yet;
    settlements are of jobs in flight and of their kind; each rank that reports exists and reports once, unless it was
    asked to report again. A load that was given up counts as reported: its blocks may be another's by then.
    Does not verify: whether a job may be settled yet, and as what (RANK_AGREEMENT); jobs that are never settled
    (LIVENESS).
    """

    rule = "COMPLETION_ONCE"

    @on(e.LoadIssued, e.SaveIssued, e.TailSaveIssued)
    def _issued(self, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued) -> None:
        if not self.jobs.is_new:
            detail = f"job {event.job_id} is issued, but {self.jobs.last_id} had been reached: ids are used once"
            self.broken(detail, event.cause)

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported) -> None:
        if not self.jobs.is_plain_report:
            self._check_report(event)

    def _check_report(self, event: e.TransferReported) -> None:
        job = self.jobs.reported
        if job is None:
            if not event.is_repeated:
                self.broken(f"job {event.job_id} was reported, but no such job is in flight")
            return
        ranks = frozenset((*event.ranks_done, *event.ranks_failed))
        num_ranks = len(self.jobs.every_rank)
        twice = ranks & self.jobs.reported_before if not event.is_repeated else frozenset()
        if twice or len(ranks) < len(event.ranks_done) + len(event.ranks_failed):
            detail = f"job {event.job_id} was reported more than once by ranks {sorted(twice or ranks)}"
            self.broken(detail, job.sequence, request_id=job.request_id)
        foreign = sorted(ranks.difference(range(num_ranks)))
        if foreign:
            detail = f"job {event.job_id} was reported by ranks {foreign}, of {num_ranks}"
            self.broken(detail, job.sequence, request_id=job.request_id)

    @on(e.LoadCompleted, e.LoadFailed)
    def _load_settled(self, event: e.LoadCompleted | e.LoadFailed) -> None:
        self._check_settlement(event, is_load=True)

    @on(e.SaveCompleted, e.SaveFailed)
    def _save_settled(self, event: e.SaveCompleted | e.SaveFailed) -> None:
        self._check_settlement(event, is_load=False)

    def _check_settlement(self, event: _Settled, *, is_load: bool) -> None:
        job = self.jobs.current
        if job is None:
            self.broken(f"{event.id} for job {event.job_id}, which is not in flight", event.cause)
        elif job.is_load is not is_load:
            detail = f"{event.id} for job {event.job_id}, which is a {'load' if job.is_load else 'save'}"
            self.broken(detail, job.sequence, event.cause)
