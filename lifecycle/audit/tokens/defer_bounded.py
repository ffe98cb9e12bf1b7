"""DEFER_BOUNDED: a lookup is put off for a job under way, and not for ever."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import on
from kvledger.lifecycle.audit.model.start import Start


class DeferBounded(Checker):
    """Every deferred lookup names a save in flight, and there are at most `max_deferred_lookups` in a row.

    Verifies: the job is a save that has not been settled, or with windows any such job; the count in a row, with a
    count of the checker's own.
    Does not verify: that waiting was worth it.
    """

    rule = "DEFER_BOUNDED"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._in_a_row: dict[str, int] = {}
        model.forgotten.at((e.RequestArrived, e.RequestPreempted, e.RequestFinished), self._in_a_row)

    def begin(self, start: Start) -> None:
        """Take over how often in a row each request was put off."""
        self._in_a_row.update(start.num_deferred)

    @on(e.LookupDeferred)
    def _deferred(self, event: e.LookupDeferred) -> None:
        count = self._in_a_row[event.request_id] = self._in_a_row.get(event.request_id, 0) + 1
        job = self.jobs.get(event.job_id)
        may_be_load = self.geometry.windows.forget
        if job is None or (job.is_load and not may_be_load):
            detail = f"put off for job {event.job_id}, which is no save in flight"
            self.broken(detail, event.cause)
        maximum = self.configuration.max_deferred_lookups
        if count > maximum or event.num_deferred != count:
            detail = f"put off {count} times in a row (recorded: {event.num_deferred}), at most {maximum} may be"
            self.broken(detail, event.cause)

    @on(e.LookupAnswered)
    def _forget(self, event: e.LookupAnswered) -> None:
        self._in_a_row.pop(event.request_id, None)

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        self._in_a_row.clear()
