"""How far each request's chunks have been dealt with: saved, found saved already, or declined.

The cursor only ever counts whole chunks below the settled frontier. A new generation starts it again,
because what lies below may have been evicted meanwhile; chunks that are still there cost nothing.
"""

from __future__ import annotations

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections import Projection
from kvledger.lifecycle.projections.tracker import RequestRecord, RequestTracker
from kvledger.lifecycle.ranges import LifeOrdinal, NumTokens
from kvledger.lifecycle.states import BlocksRegion


class State(msgspec.Struct, forbid_unknown_fields=True):
    """By the ordinal of a life."""

    num_chunks: dict[LifeOrdinal, NumTokens] = {}


class SaveCursor(Projection):
    """Life of a request -> number of chunks from the first on that need no further thought.

    They are those of the present generation, so only its own failed load starts the cursor again. To be folded before
    the tracker, which forgets lives.
    """

    def __init__(self, tracker: RequestTracker, chunk_size: int, interval_tokens: int = 0) -> None:
        self._tracker = tracker
        self._chunk_size = chunk_size
        self._interval_chunks = max(1, -(-interval_tokens // chunk_size))
        self.state = State()

    def __len__(self) -> int:
        return len(self.state.num_chunks)

    def num_chunks(self, ordinal: int) -> int:
        """Chunks dealt with, of that life of a request."""
        return self.state.num_chunks.get(ordinal, 0)

    def threshold(self, record: RequestRecord, num_chunks: int) -> int:
        """The number of settled tokens from which there is something to save behind so many chunks.

        The chunks of a prompt are for others, who may come at once. What is decoded waits for the end of an interval;
        they all begin at token 0, so that requests that decode together are not saved together.
        """
        end = (num_chunks + 1) * self._chunk_size
        if end > record.num_prompt_tokens:
            end = (num_chunks // self._interval_chunks + 1) * self._interval_chunks * self._chunk_size
        return end

    def next_threshold(self, record: RequestRecord) -> int:
        """The same behind the chunks that are dealt with."""
        return self.threshold(record, self.state.num_chunks.get(record.ordinal, 0))

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled, _sequence: int) -> None:
        for ordinal, _, num_settled_tokens, _ in event.settled:
            record = self._tracker.of(ordinal)
            # Until a load has arrived, what was computed on top of it may be wrong too.
            if record is not None and record.blocks is not BlocksRegion.LOADING:
                self.state.num_chunks[ordinal] = num_settled_tokens // self._chunk_size

    @on(e.LoadFailed, e.RequestReleased)
    def _forget(self, event: e.LoadFailed | e.RequestReleased, _sequence: int) -> None:
        if self._tracker.in_generation(event) is not None:
            self.state.num_chunks.pop(event.ordinal, None)

    @on(e.RequestPreempted, e.RequestFinished, e.RequestArrived)
    def _restart(self, event: e.RequestEvent, _sequence: int) -> None:
        self.state.num_chunks.pop(self._tracker.ordinal(event.request_id), None)

    @on(e.SessionContinued, e.TokensRolledBack)
    def _cut(self, event: e.SessionContinued | e.TokensRolledBack, _sequence: int) -> None:
        ordinal = self._tracker.ordinal(event.request_id)
        if ordinal in self.state.num_chunks:
            num_chunks = event.num_computed_tokens // self._chunk_size
            self.state.num_chunks[ordinal] = min(self.state.num_chunks[ordinal], num_chunks)

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset, _sequence: int) -> None:
        self.state.num_chunks.clear()
