"""Who reads a log: a visitor is called with each event that it names, and asks the model about everything else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Generic, TypeVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.marks import marked
from kvledger.lifecycle.reader.model import Model
from kvledger.lifecycle.reader.moment import Visit, Visits
from kvledger.lifecycle.reader.records import Life

_Model = TypeVar("_Model", bound=Model)


class Visitor(Generic[_Model]):
    """Its methods marked `@on(...)` are called with an event that the model contains already.

    A visitor may ask the model anything and changes nothing in it. It collects output. It never works out lives,
    states, generations, ranks or answers by itself, because then two parts of kvledger could disagree about a log.
    """

    needs: ClassVar[tuple[str, ...]] = ("lives",)
    """Names of the parts of the model that it asks. What these ask is folded, too."""

    def __init__(self, model: _Model) -> None:
        self.model = model
        self.moment = model.moment
        """The event at hand."""

    def visits(self) -> Visits:
        """(event class, method) in the order in which they are called for an event; a class may stand twice."""
        return marked(self)

    def lost(self, first_sequence: int, last_sequence: int) -> None:
        """These events are missing. The model has forgotten what it cannot know any more."""

    def ended(self, life: Life) -> None:
        """A life is over: released, or its id is used again. Called once for each life, after its last event."""

    def finish(self) -> None:
        """The log has no more events."""


class Reader:
    """Folds the model and calls visitors, in the order in which they are given."""

    def __init__(self, model: Model, visitors: Iterable[Visitor[Any]]) -> None:
        self.model = model
        self._visitors = tuple(visitors)
        self.num_events = 0
        """Events taken, that at which something was raised included."""
        self._ends_anywhere = False
        self._visits = self._make_visits()

    def _make_visits(self) -> dict[type[e.Event], tuple[Visit, ...]]:
        """Event class → what is called with each event of it: folds, then methods of visitors."""
        needs = {name for visitor in self._visitors for name in visitor.needs}
        folds: dict[type[e.Event], list[Visit]] = {}
        methods: dict[type[e.Event], list[Visit]] = {}
        for event_class, fold in self.model.folds(needs) if self._visitors else ():
            folds.setdefault(event_class, []).append(fold)  # type: ignore[arg-type]
        for visitor in self._visitors:
            for event_class, method in visitor.visits():
                methods.setdefault(event_class, []).append(method)  # type: ignore[arg-type]
        made: dict[type[e.Event], tuple[Visit, ...]] = {}
        for event_class in dict.fromkeys((*folds, *methods)):
            before, after = folds.get(event_class, []), methods.get(event_class, [])
            if event_class is e.RequestReleased:
                after = [*after, self._end_lives]
            elif event_class is e.RequestArrived or (self._ends_anywhere and event_class in self.model.request_events):
                before = [*before, self._end_lives]
            made[event_class] = (*before, *after)
        return made

    def _end_lives(self, _event: e.Event) -> None:
        for life in self.model.lives.pop_over():
            for visitor in self._visitors:
                visitor.ended(life)

    def take(self, events: Iterable[tuple[int, e.Event]]) -> None:
        """Take up the next events, in the order of the log.

        Raises:
            Exception: whatever a visitor raises; `model.moment` says at which event. Nothing more can be taken.
        """
        moment, visits = self.model.moment, self._visits
        for sequence, event in events:
            moment.sequence, moment.event = sequence, event
            if not event.is_decision:
                moment.cause = sequence
            self.num_events += 1
            moment.time_ns = getattr(event, "time_ns", moment.time_ns)
            for visit in visits.get(type(event), ()):
                visit(event)

    def lost(self, first_sequence: int, last_sequence: int) -> None:
        """Events are missing here, or the log begins late."""
        self.model.lost()
        self._ends_anywhere = True
        self._visits = self._make_visits()
        for visitor in self._visitors:
            visitor.lost(first_sequence, last_sequence)

    def finish(self) -> None:
        """The log has no more events."""
        for visitor in self._visitors:
            visitor.finish()
