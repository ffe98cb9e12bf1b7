"""RESUME_COVERS_OUTPUT: a preempted request is looked up with all its tokens, its outputs included."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.moment import on


class ResumeCoversOutput(Checker):
    """A lookup after a preemption counts at least the tokens that the request was known to have then.

    Verifies: the tokens of every such lookup against the engine's count at the preemption and those of steps before.
    Does not verify: that the engine's count is right where no step has recorded as many.
    """

    rule = "RESUME_COVERS_OUTPUT"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._known: dict[str, tuple[int, int]] = {}
        """Request id -> (tokens known at its last preemption, sequence)."""
        model.forgotten.at((*LIFE, e.SessionContinued), self._known)

    @on(e.LookupRequested)
    def _requested(self, event: e.LookupRequested) -> None:
        known = self._known.get(event.request_id)
        if known is not None and event.num_tokens < known[0]:
            num_known, sequence = known
            detail = f"looked up with {event.num_tokens} tokens, but {num_known} were known when it was preempted"
            self.broken(detail, sequence)

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted) -> None:
        if self.moment.life is not None:
            self._known[event.request_id] = max(self.moment.life.num_tokens, event.num_tokens), self.moment.sequence
