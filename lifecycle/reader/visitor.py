"""Who reads a log: a visitor is called with each event that it names, and asks the model about everything else."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from hashlib import blake2b
from typing import Any, ClassVar, Generic, TypeVar

import attrs
import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.code import hash_of_module, hash_of_reader
from kvledger.lifecycle.marks import marked
from kvledger.lifecycle.reader.model import Model, StoredModel
from kvledger.lifecycle.reader.moment import Visit, Visits
from kvledger.lifecycle.reader.records import Life
from kvledger.lifecycle.untrusted import from_msgpack

_Model = TypeVar("_Model", bound=Model)
_encode = msgspec.msgpack.Encoder().encode


@cache
def _layout(state: type[msgspec.Struct]) -> str:
    return repr(msgspec.inspect.type_info(state))


class NoState(msgspec.Struct, forbid_unknown_fields=True):
    """Of a visitor that remembers nothing."""


class StoredReader(msgspec.Struct, forbid_unknown_fields=True):
    """What a reader and its visitors know after an event."""

    fingerprint: str
    model: StoredModel
    visitors: list[msgspec.Raw]
    """The state of each visitor, in their order."""


class NotResumable(ValueError):
    """Stored bytes are no state that this code can go on from; the message says why."""


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
    """Folds the model and calls visitors, in the order in which they are given."""

    def __init__(self, model: Model, visitors: Iterable[Visitor[Any]]) -> None:
        self.model = model
        self._visitors = tuple(visitors)
        self.num_events = 0
        """Events taken, that at which something was raised included."""
        self._decided = tuple(each.decided for each in self._visitors if type(each).decided is not Visitor.decided)
        self._num_decided = 0
        """Events taken when visitors were last told that an observation is complete."""
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
        states = [msgspec.Raw(_encode(visitor.state)) for visitor in self._visitors]
        return _encode(StoredReader(self.fingerprint(core_fingerprint), self.model.stored(), states))

    def resume(self, stored: bytes, core_fingerprint: str) -> None:
        """Know what was captured; to be called before the first event.

        Raises:
            NotResumable: other code captured it, or under another configuration, or it is no such state. This reader
                is of no use then.
        """
        try:
            there: StoredReader = from_msgpack(stored, StoredReader)
            is_ours = there.fingerprint == self.fingerprint(core_fingerprint)
            if is_ours:
                self.model.resume(there.model)
                for visitor, state in zip(self._visitors, there.visitors, strict=True):
                    visitor.state = from_msgpack(bytes(state), type(visitor.state))
                    visitor.index()
        except Exception as error:  # a state that no log leads to may stumble anywhere
            message = f"the stored state cannot be used: {type(error).__name__}: {error}"
            raise NotResumable(message) from error
        if not is_ours:
            message = "the stored state cannot be used: other code stored it, or for another configuration"
            raise NotResumable(message)

    def fingerprint(self, core_fingerprint: str) -> str:
        """What must be equal for a state to mean the same: code, configuration, and the layout of the state."""
        kinds = [(type(visitor).__qualname__, hash_of_module(type(visitor).__module__)) for visitor in self._visitors]
        layouts = [_layout(StoredModel), *(_layout(type(visitor.state)) for visitor in self._visitors)]
        parts = core_fingerprint, attrs.asdict(self.model.configuration), hash_of_reader(), kinds, layouts
        return blake2b(_encode(parts), digest_size=16).hexdigest()

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
