"""What a checker is.

A checker holds one rule against a log, event by event, in bounded memory: it forgets a request when the request
is released. It is given the event and the audit's model, which contains the event already, and never what decided:
no projection can be reached from here. What it needs from before, it keeps for itself.
"""

from __future__ import annotations

from typing import ClassVar

from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.audit.violations import Violation
from kvledger.lifecycle.events import NO_LIFE
from kvledger.lifecycle.reader.model import EVERY_PART
from kvledger.lifecycle.reader.visitor import Visitor


class Checker(Visitor[AuditModel]):
    """One rule, made anew for every audit. Its methods marked `@on(...)` look at events and say what is `broken`.

    They are called in the order in which they stand in the class, those of a base class first. Most events are sound,
    and finding that out must cost little.
    """

    needs = tuple(EVERY_PART)
    rule: ClassVar[str]
    expects_own_evictions: ClassVar[bool] = False
    """Whether it cannot be checked with an extension that says what is evicted last: the log has no word of that."""

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self.configuration, self.layout = model.configuration, model.layout
        self.lives, self.tables, self.copies, self.answers = model.lives, model.tables, model.copies, model.answers
        self.slots, self.chunks, self.tails, self.room = model.slots, model.chunks, model.tails, model.room

    def begin(self) -> None:
        """Ask the model what is in flight, so that this raises no false alarm.

        Called before the first event where an audit begins in the middle of a log. The model knows what came before;
        by default, the checker does not.
        """

    def broken(self, detail: str, *evidence: int, request_id: str | None = None) -> None:
        """The event at hand breaks the rule. Request and generation are taken from it where it names them.

        Args:
            detail: what is wrong, in words.
            evidence: sequence numbers of earlier events that show it; 0 stands for nothing and is left out.
            request_id: of the request concerned, where the event does not name it.
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
