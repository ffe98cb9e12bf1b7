"""COMPLETION_ONCE: each rank reports a job once, and a job is settled once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.jobs import InFlight, JobsInFlight
from kvledger.lifecycle.audit.model.moment import Check, Moment

_Settled = e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed


class CompletionOnce:
    """Every job is issued once, reported at most once by each rank, and settled once.

    Verifies: reports are of jobs in flight, or of saves that were given up, by ranks that have not spoken of them yet;
    settlements are of jobs in flight and of their kind; each rank that reports exists and reports once, unless it was
    asked to tell again. A load that was given up counts as reported: its blocks may be another's by then.
    Does not verify: whether a job may be settled yet, and as what (RANK_AGREEMENT); jobs that are never settled
    (LIVENESS).
    """

    rule: ClassVar[str] = "COMPLETION_ONCE"

    _jobs: JobsInFlight

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._jobs = model.jobs
        return [
            (e.LoadIssued, self._issued),
            (e.SaveIssued, self._issued),
            (e.TailSaveIssued, self._issued),
            (e.TransferReported, self._reported),
            (e.LoadCompleted, self._load_settled),
            (e.LoadFailed, self._load_settled),
            (e.SaveCompleted, self._save_settled),
            (e.SaveFailed, self._save_settled),
        ]

    def _issued(self, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued, moment: Moment) -> list[Violation] | None:
        if self._jobs.is_new:
            return None
        detail = f"job {event.job_id} is issued, but {self._jobs.last_id} had been reached: ids are used once"
        return [violation(self.rule, moment, detail, event.cause)]

    def _reported(self, event: e.TransferReported, moment: Moment) -> Iterator[Violation] | None:
        return None if self._jobs.is_plain_report else self._check_report(event, moment)

    def _check_report(self, event: e.TransferReported, moment: Moment) -> Iterator[Violation]:
        job = self._jobs.reported
        if job is None and event.is_repeated:
            return
        if job is None:
            detail = f"job {event.job_id} was reported, but no such job is in flight"
            yield violation(self.rule, moment, detail)
            return
        ranks = frozenset((*event.ranks_done, *event.ranks_failed))
        num_ranks = len(self._jobs.every_rank)
        twice = ranks & self._jobs.told_before if not event.is_repeated else frozenset()
        if twice or len(ranks) < len(event.ranks_done) + len(event.ranks_failed):
            detail = f"job {event.job_id} was reported more than once by ranks {sorted(twice or ranks)}"
            yield violation(self.rule, moment, detail, job.sequence, request_id=job.request_id)
        foreign = sorted(ranks.difference(range(num_ranks)))
        if foreign:
            detail = f"job {event.job_id} was reported by ranks {foreign}, of {num_ranks}"
            yield violation(self.rule, moment, detail, job.sequence, request_id=job.request_id)

    def _load_settled(self, event: e.LoadCompleted | e.LoadFailed, moment: Moment) -> Iterator[Violation] | None:
        job = self._jobs.current
        return None if job is not None and job.is_load else self._check_settlement(event, job, moment)

    def _save_settled(self, event: e.SaveCompleted | e.SaveFailed, moment: Moment) -> Iterator[Violation] | None:
        job = self._jobs.current
        return None if job is not None and not job.is_load else self._check_settlement(event, job, moment)

    def _check_settlement(self, event: _Settled, job: InFlight | None, moment: Moment) -> Iterator[Violation]:
        if job is None:
            detail = f"{event.id} for job {event.job_id}, which is not in flight"
            yield violation(self.rule, moment, detail, event.cause)
        else:
            detail = f"{event.id} for job {event.job_id}, which is a {'load' if job.is_load else 'save'}"
            yield violation(self.rule, moment, detail, job.sequence, event.cause)
