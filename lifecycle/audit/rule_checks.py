"""Checks rules on the events of a log: the half of an audit that does not use the code that decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.events import Event
from kvledger.lifecycle.reader.visitor import Reader

MakeChecker = Callable[[AuditModel], Checker]


class RuleChecks:
    """Folds each event into the audit's model, then calls the checkers. They report to the model's `violations`.

    Args:
        model: the audit's model, with the state before the first event.
        checkers: functions that make the checkers. The checkers are called in this order.
        begins_late: whether the audit begins in the middle of a log. If so, `model` must contain the state from
            the earlier events.
    """

    def __init__(self, model: AuditModel, checkers: Iterable[MakeChecker], *, begins_late: bool = False) -> None:
        self.moment = model.moment
        """The current event, or the last one."""
        self.violations = model.violations
        self.checkers = tuple(make(model) for make in checkers)
        self._reader = Reader(model, self.checkers)
        for checker in self.checkers if begins_late else ():
            checker.begin()

    @property
    def num_events(self) -> int:
        """Number of events looked at."""
        return self._reader.num_events

    def take(self, events: Iterable[tuple[int, Event]]) -> None:
        """Check the rules on the next events, in the order of the log.

        Raises:
            Exception: a fold or a check raised it at the event in `moment`. Check no more events after that.
        """
        self._reader.take(events)
