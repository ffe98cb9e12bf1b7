"""Who reads a log: a visitor is called with each event that it names, and asks the model about everything else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Generic, TypeVar

import attrs
import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.code import hash_of_reader
from kvledger.lifecycle.marks import marked
from kvledger.lifecycle.reader.model import Model, StoredModel
from kvledger.lifecycle.reader.moment import Visit, Visits
from kvledger.lifecycle.reader.records import Life
from kvledger.lifecycle.reader.stored import NotResumable, StoredState, digest, layout_of
from kvledger.lifecycle.untrusted import from_msgpack

_Model = TypeVar("_Model", bound=Model)
_encode = msgspec.msgpack.Encoder().encode


class NoState(msgspec.Struct, forbid_unknown_fields=True):
    """Of a visitor that remembers nothing."""


class StoredReader(msgspec.Struct, forbid_unknown_fields=True):
    """What a reader and its visitors know after an event."""

    layout: str
    code: str
    model: StoredModel
    visitors: dict[str, StoredState]
    """By the name of the visitor's class."""


class Visitor(Generic[_Model]):
    """Its methods marked `@on(...)` are called with an event that the model contains already.

    A visitor may ask the model anything and changes nothing in it. It collects output. It never works out lives,
    states, generations, ranks or answers by itself, because then two parts of kvledger could disagree about a log.

    A visitor that remembers anything has it in `state`, so that reading can stop after an event and go on elsewhere.
    """

    needs: ClassVar[tuple[str, ...]] = ("lives",)
    """Names of the parts of the model that it asks. What these ask is folded, too."""

    def __init__(self, model: _Model) -> None:
        self.model = model
        self.moment = model.moment
        """The event at hand."""
        self.state: msgspec.Struct = NoState()
        """All that it remembers, as plain values. To go on, another one is put in its place."""

    def index(self) -> None:
        """Make anew what follows from the state; called when model and state are those of another reader."""

    def visits(self) -> Visits:
        """(event class, method) in the order in which they are called for an event; a class may stand twice."""
        return marked(self)

    def decided(self) -> None:
        """The model contains the last observation and everything that was decided upon it."""

    def lost(self, first_sequence: int, last_sequence: int) -> None:
        """These events are missing. The model has forgotten what it cannot know any more."""

    def ended(self, life: Life) -> None:
        """A life is over: released, or its id is used again. Called once for each life, after its last event."""

    def finish(self) -> None:
        """The log has no more events."""


class Reader:
    """Folds the model and calls visitors, in the order in which they are given.

    Args:
        model: before the first event.
        visitors: each is of another class, if the reader is to be captured.
        needs: names of parts of the model that are folded besides those that the visitors need.
    """

    def __init__(self, model: Model, visitors: Iterable[Visitor[Any]], *, needs: Iterable[str] = ()) -> None:
        self.model = model
        self._visitors = tuple(visitors)
        self._needs = frozenset(needs).union(*(visitor.needs for visitor in self._visitors))
        self.num_events = 0
        """Events taken, that at which something was raised included."""
        self._decided = tuple(each.decided for each in self._visitors if type(each).decided is not Visitor.decided)
        self._num_decided = 0
        """Events taken when visitors were last told that an observation is complete."""
        self._ends_anywhere = False
        self._visits = self._make_visits()

    def _make_visits(self) -> dict[type[e.Event], tuple[Visit, ...]]:
        """Event class → what is called with each event of it: folds, then methods of visitors."""
        folds: dict[type[e.Event], list[Visit]] = {}
        methods: dict[type[e.Event], list[Visit]] = {}
        for event_class, fold in self.model.folds(self._needs) if self._needs else ():
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
        """Take up the next events, in the order of the log: observations, each with everything decided upon it.

        Raises:
            Exception: whatever a visitor raises; `model.moment` says at which event. Nothing more can be taken.
        """
        moment, visits = self.model.moment, self._visits
        for sequence, event in events:
            if not event.is_decision:
                self._finish_observation()
                moment.cause = sequence
            moment.sequence, moment.event = sequence, event
            self.num_events += 1
            moment.time_ns = getattr(event, "time_ns", moment.time_ns)
            for visit in visits.get(type(event), ()):
                visit(event)
        self._finish_observation()

    def _finish_observation(self) -> None:
        if self._decided and self._num_decided != self.num_events:
            self._num_decided = self.num_events
            for decided in self._decided:
                decided()

    def capture(self, core_fingerprint: str) -> bytes:
        """Return everything that the model and the visitors know now.

        Args:
            core_fingerprint: of the core that reads, see `Core.fingerprint`.
        """
        visitors = {_name(visitor): StoredState.of(visitor, visitor.state) for visitor in self._visitors}
        layout = self._layout(core_fingerprint)
        return _encode(StoredReader(layout, hash_of_reader(), self.model.stored(), visitors))

    def resume(self, stored: bytes, core_fingerprint: str, *, trusts_other_code: bool = False) -> None:
        """Know what was captured; to be called before the first event.

        What other visitors had remembered is left out.

        Args:
            stored: as `capture` returned it.
            core_fingerprint: of the core that reads.
            trusts_other_code: whether it is used also if other code has folded it, as long as it has the same layout.

        Raises:
            NotResumable: other code captured it, or under another configuration, or without one of these visitors, or
                it is no such state. This reader is of no use then.
        """
        try:
            there: StoredReader = from_msgpack(stored, StoredReader)
            self._check(there, core_fingerprint, trusts_other_code=trusts_other_code)
            self.model.resume(there.model, trusts_other_code=trusts_other_code)
            for visitor in self._visitors:
                state = there.visitors[_name(visitor)]
                visitor.state = state.state_for(visitor, type(visitor.state), trusts_other_code=trusts_other_code)
                visitor.index()
        except NotResumable as error:
            message = f"the stored state cannot be used: {error}"
            raise NotResumable(message) from error
        except Exception as error:  # a state that no log leads to may stumble anywhere
            message = f"the stored state cannot be used: {type(error).__name__}: {error}"
            raise NotResumable(message) from error

    def _check(self, there: StoredReader, core_fingerprint: str, *, trusts_other_code: bool) -> None:
        if there.layout != self._layout(core_fingerprint):
            raise NotResumable("it was stored for another configuration, or has another layout")
        if there.code != hash_of_reader() and not trusts_other_code:
            raise NotResumable("other code has stored it")

    def _layout(self, core_fingerprint: str) -> str:
        """What must be equal for the model's state to mean the same, besides the code."""
        return digest(core_fingerprint, attrs.asdict(self.model.configuration), layout_of(StoredModel))

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


def _name(visitor: Visitor[Any]) -> str:
    return type(visitor).__qualname__
