"""FAILED_LOAD_TAINT: what failed to load is not offered again as it is, and not for ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import ReplayedEvent


@attrs.frozen
class _Failure:
    sequence: int
    request_id: str
    keys: tuple[bytes, ...]


class FailedLoadTaint:
    """A failed load taints its chunks at once; a request whose loads keep failing gets no more of them.

    Verifies: when the next observation comes, no chunk of a failed load is committed any more; no load is issued for a
    request that has `max_failed_loads` failed ones behind it.
    Does not verify: loads from tainted chunks (LOADABLE_AFTER_COMMIT), and tails, which are dropped with the load.
    """

    rule: ClassVar[str] = "FAILED_LOAD_TAINT"
    looks_at: ClassVar[frozenset[type[e.Event]]] = frozenset(
        {e.LoadIssued, e.LoadCompleted, e.LoadFailed, e.StepScheduled, e.LookupRequested, e.TransferReported}
    )

    def __init__(self) -> None:
        self._keys: dict[int, tuple[bytes, ...]] = {}
        self._failures: list[_Failure] = []

    def check(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Follow loads to their end."""
        event = step.event
        if not event.is_decision:
            failures, self._failures = self._failures, []
            for failure in failures:
                if any(projections.chunks.get(key) is not None for key in failure.keys):
                    detail = "its load failed, but chunks of that load can still be looked up"
                    yield violation(
                        self.rule, step, projections, detail, failure.sequence, request_id=failure.request_id
                    )
        if isinstance(event, e.LoadIssued):
            job = projections.transfers.get(event.job_id)
            self._keys[event.job_id] = () if job is None else job.keys
            record = projections.tracker.get(event.request_id)
            maximum = projections.configuration.max_failed_loads
            if record is not None and record.num_failed_loads >= maximum:
                detail = f"load {event.job_id} is issued after {record.num_failed_loads} failed ones, {maximum} may be"
                yield violation(self.rule, step, projections, detail, event.cause)
        elif isinstance(event, e.LoadCompleted):
            self._keys.pop(event.job_id, None)
        elif isinstance(event, e.LoadFailed):
            keys = self._keys.pop(event.job_id, ())
            self._failures.append(_Failure(step.sequence, event.request_id, keys))
