"""COMPLETION_ONCE: each rank reports a job once, and a job is settled once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import JOB_ISSUED, JOB_SETTLED, Violation, violation
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import ReplayedEvent


@attrs.define
class _Count:
    sequence: int
    is_load: bool
    done: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()


class CompletionOnce:
    """Every job is issued once, reported at most once by each rank, and settled once.

    Verifies: reports and settlements are of jobs in flight and of their kind; each rank that reports exists and reports
    once, unless it was asked to tell again.
    Does not verify: whether a job may be settled yet, and as what (RANK_AGREEMENT); jobs that are never settled
    (LIVENESS).
    """

    rule: ClassVar[str] = "COMPLETION_ONCE"
    looks_at: ClassVar[frozenset[type[e.Event]]] = frozenset({*JOB_ISSUED, *JOB_SETTLED, e.TransferReported})

    def __init__(self) -> None:
        self._in_flight: dict[int, _Count] = {}
        self._last_job_id = 0

    def check(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Count reports per job."""
        event = step.event
        if isinstance(event, e.LoadIssued | e.SaveIssued | e.TailSaveIssued):
            if event.job_id <= self._last_job_id:
                detail = f"job {event.job_id} is issued, but {self._last_job_id} had been reached: ids are used once"
                yield violation(self.rule, step, projections, detail, event.cause)
            self._last_job_id = max(self._last_job_id, event.job_id)
            self._in_flight[event.job_id] = _Count(step.sequence, isinstance(event, e.LoadIssued))
        elif isinstance(event, e.TransferReported):
            yield from self._check_report(event, step, projections)
        elif isinstance(event, e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed):
            yield from self._check_settlement(event, step, projections)

    def _check_report(
        self, event: e.TransferReported, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation]:
        count = self._in_flight.get(event.job_id)
        if count is None and event.is_repeated:
            return
        if count is None:
            detail = f"job {event.job_id} was reported, but no such job is in flight"
            yield violation(self.rule, step, projections, detail)
            return
        ranks = frozenset((*event.ranks_done, *event.ranks_failed))
        num_ranks = projections.configuration.num_ranks
        twice = ranks & (count.done | count.failed) if not event.is_repeated else frozenset()
        if twice or len(ranks) < len(event.ranks_done) + len(event.ranks_failed):
            detail = f"job {event.job_id} was reported more than once by ranks {sorted(twice or ranks)}"
            yield self._of_job(event, step, projections, detail, count)
        foreign = sorted(ranks.difference(range(num_ranks)))
        if foreign:
            detail = f"job {event.job_id} was reported by ranks {foreign}, of {num_ranks}"
            yield self._of_job(event, step, projections, detail, count)
        owing = frozenset(range(num_ranks)) - count.done - count.failed
        count.done |= owing.intersection(event.ranks_done)
        count.failed |= owing.intersection(event.ranks_failed) - count.done

    def _of_job(
        self, event: e.TransferReported, step: ReplayedEvent, projections: Projections, detail: str, count: _Count
    ) -> Violation:
        job = projections.transfers.get(event.job_id)
        request_id = "" if job is None else job.request_id
        return violation(self.rule, step, projections, detail, count.sequence, request_id=request_id)

    def _check_settlement(
        self,
        event: e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed,
        step: ReplayedEvent,
        projections: Projections,
    ) -> Iterator[Violation]:
        count = self._in_flight.pop(event.job_id, None)
        if count is None:
            detail = f"{event.id} for job {event.job_id}, which is not in flight"
            yield violation(self.rule, step, projections, detail, event.cause)
            return
        if count.is_load is not isinstance(event, e.LoadCompleted | e.LoadFailed):
            detail = f"{event.id} for job {event.job_id}, which is a {'load' if count.is_load else 'save'}"
            yield violation(self.rule, step, projections, detail, count.sequence, event.cause)
