"""RANK_AGREEMENT: what a job came to is decided when every rank has spoken, and one failed rank fails it for all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import JOB_ISSUED, JOB_SETTLED, Violation, violation
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import ReplayedEvent


@attrs.define
class _Told:
    sequence: int
    done: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()


class RankAgreement:
    """A job is completed when every rank has done it and none failed; it is settled early by no single rank.

    Verifies: this for every settled job; that a job failed because of a report, and slots of a failed save that are
    used again, were reported by every rank: another one may still be copying.
    Does not verify: that every rank was given the same jobs; jobs given up because a rank fell silent.
    """

    rule: ClassVar[str] = "RANK_AGREEMENT"
    looks_at: ClassVar[frozenset[type[e.Event]]] = frozenset({*JOB_ISSUED, *JOB_SETTLED, e.TransferReported})

    def __init__(self) -> None:
        self._in_flight: dict[int, _Told] = {}
        self._report_sequence = 0

    def check(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Count ranks per job."""
        event = step.event
        if isinstance(event, e.LoadIssued | e.SaveIssued | e.TailSaveIssued):
            self._in_flight[event.job_id] = _Told(step.sequence)
        elif isinstance(event, e.TransferReported):
            self._report_sequence = step.sequence
            told = self._in_flight.get(event.job_id)
            if told is not None:
                owing = frozenset(range(projections.configuration.num_ranks)) - told.done - told.failed
                told.done |= owing.intersection(event.ranks_done)
                told.failed |= owing.intersection(event.ranks_failed) - told.done
        elif isinstance(event, e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed):
            told = self._in_flight.pop(event.job_id, None)
            if told is not None:
                yield from self._check_settlement(event, told, step, projections)

    def _check_settlement(
        self,
        event: e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed,
        told: _Told,
        step: ReplayedEvent,
        projections: Projections,
    ) -> Iterator[Violation]:
        num_ranks = projections.configuration.num_ranks
        if isinstance(event, e.LoadCompleted | e.SaveCompleted):
            agreed = len(told.done) == num_ranks
        else:
            by_report = event.quiet if isinstance(event, e.SaveFailed) else event.cause == self._report_sequence
            agreed = not by_report or len(told.done) + len(told.failed) == num_ranks
        if not agreed:
            detail = (
                f"{event.id} for job {event.job_id}, which {len(told.done)} of {num_ranks} ranks did "
                f"and {len(told.failed)} failed to do"
            )
            yield violation(self.rule, step, projections, detail, told.sequence, event.cause)
