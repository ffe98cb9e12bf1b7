"""RESUME_COVERS_OUTPUT: a preempted request is looked up with all its tokens, its outputs included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import ReplayedEvent


class ResumeCoversOutput:
    """A lookup after a preemption counts at least the tokens that the request was known to have then.

    Verifies: the tokens of every such lookup against those that steps had told of, and against what was written.
    Does not verify: tokens that were sampled since the last step that told of them.
    """

    rule: ClassVar[str] = "RESUME_COVERS_OUTPUT"
    looks_at: ClassVar[frozenset[type[e.Event]]] = frozenset(
        {e.LookupRequested, e.RequestPreempted, e.SessionContinued, e.RequestArrived, e.RequestReleased}
    )

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}
        """Request id -> (tokens known at its last preemption, sequence)."""

    def check(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Compare the lookup's tokens with those known before."""
        event = step.event
        if isinstance(event, e.LookupRequested):
            num_known, sequence = self._known.get(event.request_id, (0, 0))
            if event.num_tokens < num_known:
                detail = f"looked up with {event.num_tokens} tokens, but {num_known} were known when it was preempted"
                yield violation(self.rule, step, projections, detail, sequence)
        elif isinstance(event, e.RequestPreempted):
            record = projections.tracker.get(event.request_id)
            if record is not None:
                num_before, _ = self._known.get(event.request_id, (0, 0))
                num_known = max(num_before, record.num_tokens, event.num_settled_tokens)
                self._known[event.request_id] = (num_known, step.sequence)
        elif isinstance(event, e.RequestEvent):
            self._known.pop(event.request_id, None)
