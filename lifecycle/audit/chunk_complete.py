"""CHUNK_COMPLETE: only settled tokens are saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import ReplayedEvent
from kvledger.lifecycle.states import RequestState


class ChunkComplete:
    """Every saved chunk, and every saved tail, ends at or before the settled tokens that the log had told by then.

    Verifies: this for saves after a step, a preemption and the end; at the end the last sampled token does not
    count, whatever the status: it was never computed.
    Does not verify: that the settled count itself was right, nor the order of writes on the device.
    """

    rule: ClassVar[str] = "CHUNK_COMPLETE"
    looks_at: ClassVar[frozenset[type[e.Event]]] = frozenset(
        {
            e.StepScheduled,
            e.RequestPreempted,
            e.RequestFinished,
            e.SessionContinued,
            e.TokensRolledBack,
            e.BlocksAllocated,
            e.SaveIssued,
            e.TailSaveIssued,
            e.RequestArrived,
            e.RequestReleased,
        }
    )

    def __init__(self) -> None:
        self._settled: dict[str, tuple[int, int]] = {}
        """Request id -> (number of settled tokens, sequence of the event that told)."""

    def check(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Compare the end of a save with what is settled."""
        event = step.event
        if isinstance(event, e.SaveIssued | e.TailSaveIssued):
            num_settled_tokens, sequence = self._settled.get(event.request_id, (0, 0))
            if isinstance(event, e.TailSaveIssued):
                what, num_tokens = "the tail", event.first_token + event.num_tokens
            else:
                deepest = max(event.chunks, default=-1)
                what, num_tokens = f"chunk {deepest}", (deepest + 1) * projections.configuration.chunk_size
            if num_tokens > num_settled_tokens:
                detail = f"{what} ends at token {num_tokens}, but only {num_settled_tokens} tokens were settled"
                yield violation(self.rule, step, projections, detail, sequence, event.cause)
        else:
            self._fold(step, projections)

    def _fold(self, step: ReplayedEvent, projections: Projections) -> None:
        event, sequence = step.event, step.sequence
        if isinstance(event, e.StepScheduled):
            for ordinal, _, num_settled_tokens in event.settled:
                record = projections.tracker.by_ordinal(ordinal)
                if record is not None:
                    self._settled[record.request_id] = (num_settled_tokens, sequence)
        elif isinstance(event, e.RequestPreempted):
            self._settled[event.request_id] = (event.num_settled_tokens, sequence)
        elif isinstance(event, e.RequestFinished):
            self._settled[event.request_id] = (min(event.num_settled_tokens, event.num_tokens - 1), sequence)
        elif isinstance(event, e.SessionContinued | e.TokensRolledBack):
            before, _ = self._settled.get(event.request_id, (0, 0))
            self._settled[event.request_id] = (min(before, event.num_computed_tokens), sequence)
        elif isinstance(event, e.RequestEvent) and self._begins_anew(step):
            self._settled.pop(event.request_id, None)

    @staticmethod
    def _begins_anew(step: ReplayedEvent) -> bool:
        """Whether nothing is written yet: blocks given after a preemption are others than those it had."""
        return not isinstance(step.event, e.BlocksAllocated) or step.state_before is RequestState.PREEMPTED
