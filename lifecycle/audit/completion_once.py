"""COMPLETION_ONCE: each rank reports a job once, and a job is settled once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.indices import Indices
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.projections.transfers import JobKind
from kvledger.lifecycle.replay import Check, ReplayedEvent

_NO_RANKS: frozenset[int] = frozenset()
_OF_LOADS = (e.LoadCompleted, e.LoadFailed)
_Settled = e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed


class _Count(msgspec.Struct, gc=False):
    sequence: int
    is_load: bool
    done: frozenset[int] = _NO_RANKS
    failed: frozenset[int] = _NO_RANKS


class CompletionOnce:
    """Every job is issued once, reported at most once by each rank, and settled once.

    Verifies: reports and settlements are of jobs in flight and of their kind; each rank that reports exists and reports
    once, unless it was asked to tell again.
    Does not verify: whether a job may be settled yet, and as what (RANK_AGREEMENT); jobs that are never settled
    (LIVENESS).
    """

    rule: ClassVar[str] = "COMPLETION_ONCE"

    def __init__(self) -> None:
        self._in_flight: dict[int, _Count] = {}
        self._last_job_id = 0
        self._every_rank: frozenset[int] = frozenset()

    def begin(self, projections: Projections) -> None:
        """Take over the jobs in flight and who has reported them."""
        self._last_job_id = projections.transfers.next_job_id - 1
        for job in projections.transfers:
            self._in_flight[job.job_id] = _Count(0, job.kind is JobKind.LOAD, job.ranks_done, job.ranks_failed)

    def checks(self, indices: Indices) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._every_rank = frozenset(range(indices.configuration.num_ranks))
        return [
            (e.LoadIssued, self._issued),
            (e.SaveIssued, self._issued),
            (e.TailSaveIssued, self._issued),
            (e.TransferReported, self._reported),
            (e.LoadCompleted, self._settled),
            (e.LoadFailed, self._settled),
            (e.SaveCompleted, self._settled),
            (e.SaveFailed, self._settled),
        ]

    def _issued(
        self, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued, step: ReplayedEvent, projections: Projections
    ) -> list[Violation] | None:
        job_id, last_job_id = event.job_id, self._last_job_id
        self._in_flight[job_id] = _Count(step.sequence, type(event) is e.LoadIssued)
        if job_id > last_job_id:
            self._last_job_id = job_id
            return None
        detail = f"job {job_id} is issued, but {last_job_id} had been reached: ids are used once"
        return [violation(self.rule, step, projections, detail, event.cause)]

    def _reported(
        self, event: e.TransferReported, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        count = self._in_flight.get(event.job_id)
        if count is not None and count.done is _NO_RANKS is count.failed and not event.ranks_failed:
            ranks = event.ranks_done
            if len(ranks) == len(self._every_rank) and self._every_rank.issuperset(ranks):
                done = self._every_rank.intersection(ranks)
                if len(done) == len(ranks):  # the first report, of every rank, and of each once
                    count.done = done
                    return None
        return self._check_report(event, count, step, projections)

    def _check_report(
        self, event: e.TransferReported, count: _Count | None, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation]:
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

    def _settled(self, event: _Settled, step: ReplayedEvent, projections: Projections) -> Iterator[Violation] | None:
        count = self._in_flight.pop(event.job_id, None)
        if count is not None and count.is_load is (type(event) in _OF_LOADS):
            return None
        return self._check_settlement(event, count, step, projections)

    def _check_settlement(
        self, event: _Settled, count: _Count | None, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation]:
        if count is None:
            detail = f"{event.id} for job {event.job_id}, which is not in flight"
            yield violation(self.rule, step, projections, detail, event.cause)
        else:
            detail = f"{event.id} for job {event.job_id}, which is a {'load' if count.is_load else 'save'}"
            yield violation(self.rule, step, projections, detail, count.sequence, event.cause)
