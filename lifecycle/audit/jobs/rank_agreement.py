"""RANK_AGREEMENT: what a job came to is decided when every rank has spoken, and one failed rank fails it for all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.jobs import InFlight, JobsInFlight
from kvledger.lifecycle.audit.model.moment import Check, Moment

_Settled = e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed


class RankAgreement:
    """A job is completed when every rank has done it and none failed; it is settled early by no single rank.

    Verifies: this for every settled job; that a job failed because of a report, and slots of a failed save that are
    used again, were reported by every rank: another one may still be copying. Once all have, slots are not kept.
    Does not verify: that every rank was given the same jobs; jobs given up because a rank fell silent.
    """

    rule: ClassVar[str] = "RANK_AGREEMENT"

    def __init__(self) -> None:
        self._jobs: JobsInFlight

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._jobs = model.jobs
        return [
            (e.LoadCompleted, self._completed),
            (e.SaveCompleted, self._completed),
            (e.LoadFailed, self._load_failed),
            (e.SaveFailed, self._save_failed),
        ]

    def _completed(self, event: e.LoadCompleted | e.SaveCompleted, moment: Moment) -> list[Violation] | None:
        job = self._jobs.current
        if job is None or len(job.ranks_done) == len(self._jobs.every_rank):
            return None
        return self._disagreed(event, job, moment)

    def _load_failed(self, event: e.LoadFailed, moment: Moment) -> list[Violation] | None:
        job = self._jobs.current
        if job is None or event.cause != self._jobs.report_sequence or not self._is_owing(job):
            return None
        return self._disagreed(event, job, moment)

    def _save_failed(self, event: e.SaveFailed, moment: Moment) -> list[Violation] | None:
        job = self._jobs.current
        if job is None or event.quiet is not self._is_owing(job):
            return None
        return self._disagreed(event, job, moment)

    def _is_owing(self, job: InFlight) -> bool:
        return bool(self._jobs.every_rank - job.ranks_done - job.ranks_failed)

    def _disagreed(self, event: _Settled, job: InFlight, moment: Moment) -> list[Violation]:
        detail = (
            f"{event.id} for job {event.job_id}, which {len(job.ranks_done)} of {len(self._jobs.every_rank)} ranks did "
            f"and {len(job.ranks_failed)} failed to do"
        )
        return [violation(self.rule, moment, detail, job.sequence, event.cause)]
