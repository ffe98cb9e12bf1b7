"""Which blocks each request holds, and which it held until the current step.

Folded from allocations and step records; replaced, never appended blindly, whenever vLLM tells the whole
table. It must not know what the blocks contain.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections import Projection
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.ranges import LifeOrdinal, NumTokens, Ordinal


class State(msgspec.Struct, forbid_unknown_fields=True):
    """All by the ordinal of a life."""

    held: dict[LifeOrdinal, array] = {}  # type: ignore[type-arg]  # in Python 3.11 it takes no argument when it runs
    lost: dict[Ordinal, array] = {}  # type: ignore[type-arg]
    leaving: dict[LifeOrdinal, NumTokens] = {}
    """Tokens that were settled when the windows of a request left pages, since the last step."""
    left: dict[LifeOrdinal, NumTokens] = {}
    """The same before the last step."""


class BlockTable(Projection):
    """Life of a request -> block ids, 4 bytes each. To be folded before the tracker, which forgets lives."""

    def __init__(self, tracker: RequestTracker) -> None:
        self._tracker = tracker
        self.state = State()
        self.index()

    def index(self) -> None:
        """Make anew what follows from the state."""
        # The dict's own method, because it is asked for every save.
        self.of_life: Callable[[int], Sequence[int] | None] = self.state.held.get
        """The blocks that this life of a request holds now, in token order; None where it holds none."""

    def __len__(self) -> int:
        return len(self.state.held)

    def held(self, request_id: str) -> Sequence[int]:
        """The blocks a request holds now, in token order."""
        return self.state.held.get(self._tracker.ordinal(request_id), ())

    def lost(self, request_id: str) -> array[int] | tuple[()]:
        """The blocks it was just deprived of. Their bytes are intact until the next step's forward."""
        return self.state.lost.get(self._tracker.ordinal(request_id), ())

    def left_since(self, request_id: str) -> int | None:
        """How many tokens were settled when its windows had last left pages before the step; None: unknown.

        What they left since is free, and intact until this step's forward.
        """
        return self.state.left.get(self._tracker.ordinal(request_id))

    def left_at_end(self, request_id: str) -> int | None:
        """The same for a request that ends between two steps; intact until the next step's forward."""
        return self.state.leaving.get(self._tracker.ordinal(request_id))

    @on(e.BlocksAllocated, e.BlockTableObserved)
    def _replaced(self, event: e.BlocksAllocated | e.BlockTableObserved, _sequence: int) -> None:
        ordinal = self._tracker.ordinal(event.request_id)
        if ordinal >= 0:
            self.state.held[ordinal] = array("I", event.block_ids)

    @on(e.LookupRequested)
    def _asked(self, event: e.LookupRequested, _sequence: int) -> None:
        # Who is asked about holds nothing; after a failed asynchronous load vLLM frees the blocks without a word.
        self.state.held.pop(self._tracker.ordinal(event.request_id), None)

    @on(e.WindowLeft)
    def _window_left(self, event: e.WindowLeft, _sequence: int) -> None:
        ordinal = self._tracker.ordinal(event.request_id)
        if ordinal >= 0:
            self.state.leaving[ordinal] = event.num_settled_tokens

    @on(e.RequestPreempted, e.RequestFinished)
    def _taken(self, event: e.RequestPreempted | e.RequestFinished, _sequence: int) -> None:
        ordinal = self._tracker.ordinal(event.request_id)
        block_ids = self.state.held.pop(ordinal, None)
        if block_ids is not None:
            self.state.lost[ordinal] = block_ids

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled, _sequence: int) -> None:
        # From this step's forward on, lost blocks may be overwritten.
        self.state.lost.clear()
        self.state.left, self.state.leaving = self.state.leaving, {}
        for ordinal, block_ids in event.extended:
            held = self.state.held.get(ordinal)
            if held is not None:
                if len(block_ids) == 1:  # what a decoding request needs; an array takes anything longer by an iterator
                    held.append(block_ids[0])
                else:
                    held.extend(block_ids)

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived, _sequence: int) -> None:
        self._forget(self._tracker.ordinal(event.request_id))

    def _forget(self, ordinal: int) -> None:
        self.state.held.pop(ordinal, None)
        self.state.lost.pop(ordinal, None)
        self.state.leaving.pop(ordinal, None)

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased, _sequence: int) -> None:
        if self._tracker.in_generation(event) is not None:
            self._forget(event.ordinal)
