"""DEFER_BOUNDED: a lookup is put off for a job under way, and not for ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import ReplayedEvent


class DeferBounded:
    """Every deferred lookup names a save in flight, and there are at most `max_deferred_lookups` in a row.

    Verifies: the job is a save that has not been settled, or with windows any such job; the count in a row, with a
    count of the checker's own.
    Does not verify: that waiting was worth it.
    """

    rule: ClassVar[str] = "DEFER_BOUNDED"
    looks_at: ClassVar[frozenset[type[e.Event]]] = frozenset(
        {e.LookupDeferred, e.LookupAnswered, e.RequestPreempted, e.RequestFinished, e.RequestArrived, e.CacheReset}
    )

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}

    def check(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Count."""
        event = step.event
        if isinstance(event, e.CacheReset):
            self._in_a_row.clear()
        elif isinstance(event, e.LookupDeferred):
            count = self._in_a_row[event.request_id] = self._in_a_row.get(event.request_id, 0) + 1
            job = projections.transfers.get(event.job_id)
            may_be_load = projections.geometry.windows.forget
            if job is None or not (may_be_load or job.kind.value == "save"):
                detail = f"put off for job {event.job_id}, which is no save in flight"
                yield violation(self.rule, step, projections, detail, event.cause)
            maximum = projections.configuration.max_deferred_lookups
            if count > maximum or event.num_deferred != count:
                detail = f"put off {count} times in a row (recorded: {event.num_deferred}), at most {maximum} may be"
                yield violation(self.rule, step, projections, detail, event.cause)
        elif isinstance(event, e.RequestEvent):
            self._in_a_row.pop(event.request_id, None)
