"""Rules held against the events of a log, one by one: the half of an audit that knows nothing of what decided."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.events import Event
from kvledger.lifecycle.reader.visitor import Reader

MakeChecker = Callable[[AuditModel], Checker]


class RuleChecks:
    """Folds the audit's model and asks each checker about each event. What it finds stands in the model's violations.

    Args:
        model: before the first event that is taken.
        checkers: made in this order, in which they look at an event.
        begins_late: whether the audit begins in the middle of a log; the model knows what came before.
    """

    def __init__(self, model: AuditModel, checkers: Iterable[MakeChecker], *, begins_late: bool = False) -> None:
        self.moment = model.moment
        """Of the event that is or was last looked at."""
        self.violations = model.violations
        self.checkers = tuple(make(model) for make in checkers)
        self._reader = Reader(model, self.checkers)
        for checker in self.checkers if begins_late else ():
            checker.begin()

    @property
    def num_events(self) -> int:
        """Events looked at."""
        return self._reader.num_events

    def take(self, events: Iterable[tuple[int, Event]]) -> None:
        """Look at the next events, in the order of the log.

        Raises:
            Exception: whatever a fold or a check raises; `moment` says at which event. Nothing more can be taken.
        """
        self._reader.take(events)
