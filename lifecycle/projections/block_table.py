"""Which blocks each request holds, and which it held until the current step.

Folded from allocations and step records; replaced, never appended blindly, whenever vLLM tells the whole
table. It must not know what the blocks contain.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.tracker import RequestTracker


class BlockTable:
    """Request id -> block ids, 4 bytes each."""

    def __init__(self, tracker: RequestTracker) -> None:
        self._tracker = tracker
        self._held: dict[str, array[int]] = {}
        self._lost: dict[str, array[int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def held(self, request_id: str) -> Sequence[int]:
        """The blocks a request holds now, in token order."""
        return self._held.get(request_id, ())

    def lost(self, request_id: str) -> Sequence[int]:
        """The blocks it was just deprived of. Their bytes are intact until the next step's forward."""
        return self._lost.get(request_id, ())

    def folds(self) -> Mapping[type[e.Event], Callable[..., None]]:
        """Event class -> fold."""
        return {
            e.RequestArrived: self._arrived,
            e.BlocksAllocated: self._replaced,
            e.BlockTableObserved: self._replaced,
            e.RequestPreempted: self._taken,
            e.RequestFinished: self._taken,
            e.StepScheduled: self._step_scheduled,
            e.RequestReleased: self._released,
        }

    def snapshot(self) -> object:
        """Plain values, equal for equal states."""
        return {request_id: list(block_ids) for request_id, block_ids in self._held.items()}

    def _arrived(self, event: e.RequestArrived, _sequence: int) -> None:
        self._held.pop(event.request_id, None)
        self._lost.pop(event.request_id, None)

    def _replaced(self, event: e.BlocksAllocated | e.BlockTableObserved, _sequence: int) -> None:
        if self._tracker.get(event.request_id) is not None:
            self._held[event.request_id] = array("I", event.block_ids)

    def _taken(self, event: e.RequestPreempted | e.RequestFinished, _sequence: int) -> None:
        block_ids = self._held.pop(event.request_id, None)
        if block_ids is not None:
            self._lost[event.request_id] = block_ids

    def _step_scheduled(self, event: e.StepScheduled, _sequence: int) -> None:
        # From this step's forward on, lost blocks may be overwritten.
        self._lost.clear()
        for ordinal, block_ids in event.extended:
            record = self._tracker.by_ordinal(ordinal)
            if record is not None and record.holds_blocks:
                self._held.setdefault(record.request_id, array("I")).extend(block_ids)

    def _released(self, event: e.RequestReleased, _sequence: int) -> None:
        if self._tracker.get(event.request_id) is None:
            self._held.pop(event.request_id, None)
