"""Base class of all checkers.

A checker checks one rule, event by event. Its memory is bounded, because it forgets a request when the request is
released. The audit's model folds an event before checkers are called with it. Checkers cannot use projections or the
code that decides. Each checker stores the facts of earlier events that it needs.
"""

from __future__ import annotations

from typing import ClassVar

from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.audit.violations import Violation
from kvledger.lifecycle.events import NO_LIFE
from kvledger.lifecycle.reader.model import EVERY_PART
from kvledger.lifecycle.reader.visitor import Visitor


class Checker(Visitor[AuditModel]):
    """Checks one rule in one audit. Methods marked `@on(...)` are called with events, and call `broken` for a breach.

    The methods run in the order of their definition, and methods of a base class run first. Most events break no rule,
    so these methods must be fast.
    """

    needs = tuple(EVERY_PART)
    rule: ClassVar[str]
    expects_own_evictions: ClassVar[bool] = False
    """Whether the rule holds only if kvledger alone chooses which chunks are evicted. If an extension chooses the
    chunks that are evicted last, the rule is skipped, because the log does not record that choice."""

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self.configuration, self.layout = model.configuration, model.layout
        self.lives, self.tables, self.copies, self.answers = model.lives, model.tables, model.copies, model.answers
        self.slots, self.chunks, self.tails, self.room = model.slots, model.chunks, model.tails, model.room

    def begin(self) -> None:
        """Read the state at the audit's start from the audit's model, so that no violation is reported by mistake.

        Called before the first event if the audit begins in the middle of a log. The checker gets no earlier events.
        """

    def broken(self, detail: str, *evidence: int, request_id: str | None = None) -> None:
        """Report that the current event breaks the rule. The violation gets the event's request and generation, if any.

        Args:
            detail: what is wrong, in words.
            evidence: sequence numbers of earlier events that show the violation; zeros are left out.
            request_id: id of the request concerned, if the event does not name the request.
        """
        moment, event = self.moment, self.moment.event
        if request_id is None:
            request_id = getattr(event, "request_id", "")
        life = self.lives.get(request_id)
        generation: int | None = getattr(event, "generation", NO_LIFE)
        if generation == NO_LIFE:
            generation = None if life is None else life.generation
        if life is None and moment.life is not None and moment.life.request_id == request_id:
            life = moment.life  # it ends here
        self.model.violations.add(
            Violation(
                self.rule,
                moment.sequence,
                request_id,
                generation,
                detail,
                tuple(filter(None, evidence)),
                moment.time_ns,
                None if life is None or life.ordinal == NO_LIFE else life.ordinal,
                moment.cause,
            )
        )
