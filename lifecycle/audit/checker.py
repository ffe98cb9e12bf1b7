"""Base class of all checkers.

A checker checks one rule, event by event, in bounded memory: it forgets a request when the request is released. The
audit's model contains each event before checkers see it. Checkers cannot reach projections or code that decides, and
remember themselves what they need of earlier events.
"""

from __future__ import annotations

from typing import ClassVar

from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.audit.violations import Violation
from kvledger.lifecycle.events import NO_LIFE
from kvledger.lifecycle.reader.model import EVERY_PART
from kvledger.lifecycle.reader.visitor import Visitor


class Checker(Visitor[AuditModel]):
    """Checks one rule in one audit. Its methods marked `@on(...)` look at events and call `broken`.

    They run in the order of their definition, those of a base class first. Most events break no rule, so a look must be
    cheap.
    """

    needs = tuple(EVERY_PART)
    rule: ClassVar[str]
    expects_own_evictions: ClassVar[bool] = False
    """Whether the rule is off with an extension that chooses what is evicted last, which the log does not record."""

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self.configuration, self.layout = model.configuration, model.layout
        self.lives, self.tables, self.copies, self.answers = model.lives, model.tables, model.copies, model.answers
        self.slots, self.chunks, self.tails, self.room = model.slots, model.chunks, model.tails, model.room

    def begin(self) -> None:
        """Read from the model what is in flight, so that it raises no false alarm.

        Called before the first event if the audit begins in the middle of a log, of which only the model knows the
        beginning.
        """

    def broken(self, detail: str, *evidence: int, request_id: str | None = None) -> None:
        """Report that the current event breaks the rule. Request and generation come from the event if it names them.

        Args:
            detail: what is wrong, in words.
            evidence: sequence numbers of earlier events that show it; zeros are left out.
            request_id: the request concerned, if the event does not name it.
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
