"""DEFER_BOUNDED: a lookup is put off for a job under way, and not for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import Check, Moment
from kvledger.lifecycle.audit.model.start import Start


class DeferBounded:
    """Every deferred lookup names a save in flight, and there are at most `max_deferred_lookups` in a row.

    Verifies: the job is a save that has not been settled, or with windows any such job; the count in a row, with a
    count of the checker's own.
    Does not verify: that waiting was worth it.
    """

    rule: ClassVar[str] = "DEFER_BOUNDED"

    _model: Model

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}

    def begin(self, start: Start) -> None:
        """Take over how often in a row each request was put off."""
        self._in_a_row.update(start.num_deferred)

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._model = model
        model.forgotten.at((e.RequestArrived, e.RequestPreempted, e.RequestFinished), self._in_a_row)
        return [
            (e.LookupDeferred, self._deferred),
            (e.LookupAnswered, self._forget),
            (e.CacheReset, self._reset),
        ]

    def _deferred(self, event: e.LookupDeferred, moment: Moment) -> Iterator[Violation]:
        count = self._in_a_row[event.request_id] = self._in_a_row.get(event.request_id, 0) + 1
        job = self._model.jobs.get(event.job_id)
        may_be_load = self._model.geometry.windows.forget
        if job is None or (job.is_load and not may_be_load):
            detail = f"put off for job {event.job_id}, which is no save in flight"
            yield violation(self.rule, moment, detail, event.cause)
        maximum = self._model.configuration.max_deferred_lookups
        if count > maximum or event.num_deferred != count:
            detail = f"put off {count} times in a row (recorded: {event.num_deferred}), at most {maximum} may be"
            yield violation(self.rule, moment, detail, event.cause)

    def _forget(self, event: e.LookupAnswered, _moment: Moment) -> None:
        self._in_a_row.pop(event.request_id, None)

    def _reset(self, _event: e.CacheReset, _moment: Moment) -> None:
        self._in_a_row.clear()
