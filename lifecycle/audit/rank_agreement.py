"""RANK_AGREEMENT: what a job came to is decided when every rank has spoken, and one failed rank fails it for all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.indices import Indices
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import Check, ReplayedEvent

_NO_RANKS: frozenset[int] = frozenset()
_Settled = e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed


class _Told(msgspec.Struct, gc=False):
    sequence: int
    done: frozenset[int] = _NO_RANKS
    failed: frozenset[int] = _NO_RANKS


class RankAgreement:
    """A job is completed when every rank has done it and none failed; it is settled early by no single rank.

    Verifies: this for every settled job; that a job failed because of a report, and slots of a failed save that are
    used again, were reported by every rank: another one may still be copying.
    Does not verify: that every rank was given the same jobs; jobs given up because a rank fell silent.
    """

    rule: ClassVar[str] = "RANK_AGREEMENT"

    def __init__(self) -> None:
        self._in_flight: dict[int, _Told] = {}
        self._report_sequence = 0
        self._every_rank: frozenset[int] = frozenset()

    def begin(self, projections: Projections) -> None:
        """Take over the jobs in flight and who has reported them."""
        for job in projections.transfers:
            self._in_flight[job.job_id] = _Told(0, job.ranks_done, job.ranks_failed)

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
        self, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued, step: ReplayedEvent, _projections: Projections
    ) -> None:
        self._in_flight[event.job_id] = _Told(step.sequence)

    def _reported(self, event: e.TransferReported, step: ReplayedEvent, _projections: Projections) -> None:
        self._report_sequence = step.sequence
        told = self._in_flight.get(event.job_id)
        if told is not None:
            owing = self._every_rank if told.done is _NO_RANKS is told.failed else self._owing(told)
            told.done |= owing.intersection(event.ranks_done)
            if event.ranks_failed:
                told.failed |= owing.intersection(event.ranks_failed) - told.done

    def _owing(self, told: _Told) -> frozenset[int]:
        return self._every_rank - told.done - told.failed

    def _settled(self, event: _Settled, step: ReplayedEvent, projections: Projections) -> list[Violation] | None:
        told = self._in_flight.pop(event.job_id, None)
        if told is None:
            return None
        if isinstance(event, e.LoadCompleted | e.SaveCompleted):
            agreed = len(told.done) == len(self._every_rank)
        else:
            by_report = event.quiet if isinstance(event, e.SaveFailed) else event.cause == self._report_sequence
            agreed = not by_report or not self._owing(told)
        if agreed:
            return None
        detail = (
            f"{event.id} for job {event.job_id}, which {len(told.done)} of {len(self._every_rank)} ranks did "
            f"and {len(told.failed)} failed to do"
        )
        return [violation(self.rule, step, projections, detail, told.sequence, event.cause)]
