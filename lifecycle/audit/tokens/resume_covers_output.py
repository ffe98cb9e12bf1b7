"""RESUME_COVERS_OUTPUT: a preempted request is looked up with all its tokens, its outputs included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.moment import Check, Moment


class ResumeCoversOutput:
    """A lookup after a preemption counts at least the tokens that the request was known to have then.

    Verifies: the tokens of every such lookup against the engine's count at the preemption and those of steps before.
    Does not verify: that the engine's count is right where no step has told of as many.
    """

    rule: ClassVar[str] = "RESUME_COVERS_OUTPUT"

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}
        """Request id -> (tokens known at its last preemption, sequence)."""

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        model.forgotten.at((*LIFE, e.SessionContinued), self._known)
        return [
            (e.LookupRequested, self._requested),
            (e.RequestPreempted, self._preempted),
        ]

    def _requested(self, event: e.LookupRequested, moment: Moment) -> list[Violation] | None:
        known = self._known.get(event.request_id)
        if known is None or event.num_tokens >= known[0]:
            return None
        num_known, sequence = known
        detail = f"looked up with {event.num_tokens} tokens, but {num_known} were known when it was preempted"
        return [violation(self.rule, moment, detail, sequence)]

    def _preempted(self, event: e.RequestPreempted, moment: Moment) -> None:
        if moment.life is not None:
            self._known[event.request_id] = max(moment.life.num_tokens, event.num_tokens), moment.sequence
