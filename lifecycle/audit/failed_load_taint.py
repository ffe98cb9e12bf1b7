"""FAILED_LOAD_TAINT: what failed to load is not offered again as it is, and not for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.indices import Indices
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.projections.transfers import JobKind
from kvledger.lifecycle.replay import Check, ReplayedEvent


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

    def __init__(self) -> None:
        self._keys: dict[int, tuple[bytes, ...]] = {}
        self._failures: list[_Failure] = []

    def begin(self, projections: Projections) -> None:
        """Take over the loads in flight."""
        self._keys = {job.job_id: job.keys for job in projections.transfers if job.kind is JobKind.LOAD}

    def checks(self, _indices: Indices) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        return [
            (e.StepScheduled, self._observed),
            (e.LookupRequested, self._observed),
            (e.TransferReported, self._observed),
            (e.LoadIssued, self._issued),
            (e.LoadCompleted, self._completed),
            (e.LoadFailed, self._failed),
        ]

    def _observed(self, _event: e.Event, step: ReplayedEvent, projections: Projections) -> Iterator[Violation] | None:
        return self._check_failures(step, projections) if self._failures else None

    def _check_failures(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        failures, self._failures = self._failures, []
        for failure in failures:
            if any(projections.chunks.get(key) is not None for key in failure.keys):
                detail = "its load failed, but chunks of that load can still be looked up"
                yield violation(self.rule, step, projections, detail, failure.sequence, request_id=failure.request_id)

    def _issued(self, event: e.LoadIssued, step: ReplayedEvent, projections: Projections) -> list[Violation] | None:
        self._keys[event.job_id] = () if step.job is None else step.job.keys
        maximum = projections.configuration.max_failed_loads
        if step.record is None or step.record.num_failed_loads < maximum:
            return None
        detail = f"load {event.job_id} is issued after {step.record.num_failed_loads} failed ones, {maximum} may be"
        return [violation(self.rule, step, projections, detail, event.cause)]

    def _completed(self, event: e.LoadCompleted, _step: ReplayedEvent, _projections: Projections) -> None:
        self._keys.pop(event.job_id, None)

    def _failed(self, event: e.LoadFailed, step: ReplayedEvent, _projections: Projections) -> None:
        keys = self._keys.pop(event.job_id, ())
        self._failures.append(_Failure(step.sequence, event.request_id, keys))
