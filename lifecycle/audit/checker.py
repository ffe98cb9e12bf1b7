"""What a checker is and what it finds.

A checker holds one rule against a log, event by event, in bounded memory: it forgets a request when the request
is released. It is given the event and the audit's model, which contains the event already, and never what decided:
no projection can be reached from here. What it needs from before, it keeps for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar, Protocol

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import Check, Moment
from kvledger.lifecycle.audit.model.start import Start


@attrs.frozen
class Violation:
    """A rule that the log breaks at `sequence`."""

    rule: str
    sequence: int
    request_id: str
    """Empty where the event belongs to no single request."""
    generation: int | None
    """The generation the event speaks of, or that the request was in; None where neither is known."""
    detail: str
    evidence: tuple[int, ...]
    """Sequence numbers of earlier events that, with this one, show the breach."""


class Checker(Protocol):
    """One rule. Made anew for every audit; `looks_at` names the events it wants to be given.

    A checker of events that are frequent has `checks` instead, see `FrequentChecker`. Either kind may have
    `begin(start)`, called once before the first event of an audit that starts in the middle of a log, when the model
    has begun: it takes over what was in flight then, so that this raises no false alarm. Without it, what came before
    is unknown.
    """

    rule: ClassVar[str]
    looks_at: ClassVar[frozenset[type[e.Event]]]

    def check(self, moment: Moment, model: Model) -> Iterable[Violation] | None:
        """What is wrong with this event. The model contains it already and must not be changed."""


class FrequentChecker(Protocol):
    """One rule, with a function for each class of events: most events are sound, and finding that out must cost little.

    A check is called as `check(event, moment)`. It returns None where there is nothing to say, or the violations; so it
    is a plain function where events are frequent, and may be a generator elsewhere.
    """

    rule: ClassVar[str]

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """(event class, check), in the order in which they are to be done for an event; a class may stand twice."""


AnyChecker = Checker | FrequentChecker


def checks_of(checker: AnyChecker, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
    """The checks of either kind of checker."""
    if hasattr(checker, "checks"):
        return checker.checks(model)

    def check(_event: e.Event, moment: Moment) -> Iterable[Violation] | None:
        return checker.check(moment, model)

    return [(event_class, check) for event_class in checker.looks_at]


def begin_in_the_middle(checkers: Iterable[AnyChecker], start: Start) -> None:
    """Have the checkers take over what is in flight where an audit starts."""
    for checker in checkers:
        begin: Callable[[Start], None] | None = getattr(checker, "begin", None)
        if begin is not None:
            begin(start)


def violation(rule: str, moment: Moment, detail: str, *evidence: int, request_id: str | None = None) -> Violation:
    """A violation at this event, with request and generation taken from the event where it names them.

    An evidence of 0 stands for nothing and is left out.
    """
    event = moment.event
    if request_id is None:
        request_id = getattr(event, "request_id", "")
    generation: int | None = getattr(event, "generation", None)
    if generation is None:
        life = moment.life_of(request_id)
        generation = None if life is None else life.generation
    return Violation(rule, moment.sequence, request_id, generation, detail, tuple(s for s in evidence if s))
