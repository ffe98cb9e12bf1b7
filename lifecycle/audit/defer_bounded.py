"""DEFER_BOUNDED: a lookup is put off for a job under way, and not for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.transfers import JobKind
from kvledger.lifecycle.replay import Check, ReplayedEvent


class DeferBounded:
    """Every deferred lookup names a save in flight, and there are at most `max_deferred_lookups` in a row.

    Verifies: the job is a save that has not been settled, or with windows any such job; the count in a row, with a
    count of the checker's own.
    Does not verify: that waiting was worth it.
    """

    rule: ClassVar[str] = "DEFER_BOUNDED"

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}

    def begin(self, projections: Projections) -> None:
        """Take over how often in a row each request was put off."""
        for record in projections.tracker:
            count = projections.lookups.num_deferred(record.request_id)
            if count:
                self._in_a_row[record.request_id] = count

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        model.forgotten.at((e.RequestArrived, e.RequestPreempted, e.RequestFinished), self._in_a_row)
        return [
            (e.LookupDeferred, self._deferred),
            (e.LookupAnswered, self._forget),
            (e.CacheReset, self._reset),
        ]

    def _deferred(self, event: e.LookupDeferred, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        count = self._in_a_row[event.request_id] = self._in_a_row.get(event.request_id, 0) + 1
        job = projections.transfers.get(event.job_id)
        may_be_load = projections.geometry.windows.forget
        if job is None or not (may_be_load or job.kind is JobKind.SAVE):
            detail = f"put off for job {event.job_id}, which is no save in flight"
            yield violation(self.rule, step, projections, detail, event.cause)
        maximum = projections.configuration.max_deferred_lookups
        if count > maximum or event.num_deferred != count:
            detail = f"put off {count} times in a row (recorded: {event.num_deferred}), at most {maximum} may be"
            yield violation(self.rule, step, projections, detail, event.cause)

    def _forget(self, event: e.LookupAnswered, _step: ReplayedEvent, _projections: Projections) -> None:
        self._in_a_row.pop(event.request_id, None)

    def _reset(self, _event: e.CacheReset, _step: ReplayedEvent, _projections: Projections) -> None:
        self._in_a_row.clear()
