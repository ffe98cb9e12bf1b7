"""RELEASE_ALL: a finished request that owes nothing is released, and then forgotten everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.replay import Check, ReplayedEvent
from kvledger.lifecycle.states import RequestState


class ReleaseAll:
    """After `request.released` no projection has an entry for the request.

    Verifies: tracker, block table, chunk keys, save cursor, pending and taken-up answers, tail and jobs of that life,
    at every release; the number of entries of each projection whenever no request is left; by the first step
    after its end, a request without jobs in flight has been released.
    Does not verify: promises on chunks, one by one, and what the adapter or the engine keeps.
    """

    rule: ClassVar[str] = "RELEASE_ALL"

    def __init__(self) -> None:
        self._finished: dict[int, tuple[int, str]] = {}
        """Ordinal -> (sequence of the end, request id), until released."""

    def begin(self, projections: Projections) -> None:
        """Take over who has finished and is not released."""
        for record in projections.tracker:
            if record.state is RequestState.FINISHED:
                self._finished[record.ordinal] = (0, record.request_id)

    def checks(self, _model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        return [
            (e.RequestReleased, self._check_release),
            (e.RequestFinished, self._request_finished),
            (e.StepScheduled, self._step_scheduled),
        ]

    def _request_finished(self, event: e.RequestFinished, step: ReplayedEvent, _projections: Projections) -> None:
        record = step.record
        if record is not None and record.state is RequestState.FINISHED:
            self._finished[record.ordinal] = (step.sequence, event.request_id)

    def _step_scheduled(
        self, _event: e.StepScheduled, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        return self._check_overdue(step, projections) if self._finished else None

    def _check_release(
        self, event: e.RequestReleased, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation]:
        request_id = event.request_id
        left = {
            "tracker": projections.tracker.get(request_id) is not None,
            "blocks": len(projections.blocks.held(request_id)) > 0,
            "chunk_keys": len(projections.chunk_keys.of(request_id)) > 0,
            "save_cursor": projections.save_cursor.num_chunks(request_id) > 0,
            "lookups": projections.lookups.pending(request_id) is not None
            or projections.lookups.taken_up(request_id) is not None,
        }
        finished_at = 0
        for ordinal in [ordinal for ordinal, (_, of) in self._finished.items() if of == request_id]:
            finished_at, _ = self._finished.pop(ordinal)
            left["transfers"] = projections.transfers.owes(ordinal)
            left["tails"] = projections.tails.saved(ordinal) is not None
        if not len(projections.tracker):
            entries = projections.num_entries()
            # Jobs of a request whose id arrived again may outlive every record.
            left |= {name: left.get(name, False) or n > 0 for name, n in entries.items() if name != "transfers"}
        names = [name for name, is_left in left.items() if is_left]
        if names:
            detail = f"released, but still in: {', '.join(names)}"
            yield violation(self.rule, step, projections, detail, finished_at, event.cause)

    def _check_overdue(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        for ordinal, (sequence, request_id) in list(self._finished.items()):
            record = projections.tracker.of(ordinal)
            if record is None:
                del self._finished[ordinal]
            elif not projections.transfers.owes(ordinal):
                del self._finished[ordinal]
                detail = "finished and owes no transfer, but was not released by the next step"
                yield violation(self.rule, step, projections, detail, sequence, request_id=request_id)
