"""Reading a log: a visitor is called with the events that it names, and queries a `Model` for everything else."""

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
    """State of a visitor that remembers nothing."""


class StoredReader(msgspec.Struct, forbid_unknown_fields=True):
    """State of a reader and its visitors after an event."""

    layout: str
    code: str
    model: StoredModel
    visitors: dict[str, StoredState]
    """Name of the visitor's class → its state."""


class Visitor(Generic[_Model]):
    """Base class of everything that is called with the events of a log.

    Methods marked `@on(...)` get an event after the model has folded it. A visitor may query everything in the model
    and must not change the model. It only collects output. It never computes lives, states, generations, ranks or
    answers itself, because then two parts of kvledger could disagree about a log.

    Everything that a visitor remembers is in `state`, so that reading can stop after an event and continue in another
    process.
    """

    needs: ClassVar[tuple[str, ...]] = ("lives",)
    """Names of the parts of the model that the visitor queries. Parts that these parts query are folded too."""

    def __init__(self, model: _Model) -> None:
        self.model = model
        self.moment = model.moment
        self.state: msgspec.Struct = NoState()
        """Everything that the visitor remembers, as plain values. To restore a stored state, replace this object."""

    def index(self) -> None:
        """Recompute everything that is derived from `state`. Called after the model and `state` were restored."""

    def visits(self) -> Visits:
        """Return pairs (event class, method) in calling order. A class may occur twice."""
        return marked(self)

    def decided(self) -> None:
        """Called when the model contains an observation and all decisions that it caused."""

    def lost(self, first_sequence: int, last_sequence: int) -> None:
        """Called when these events are missing. The model has forgotten everything that they may have changed."""

    def ended(self, life: Life) -> None:
        """Called once for each life that is over: after its release, or when its request id is used again."""

    def finish(self) -> None:
        """Called after the last event of the log."""


class Reader:
    """Folds events into the model, and calls visitors in the given order.

    Args:
        model: the model, in its state before the first event.
        visitors: the visitors. If you capture the reader, they must be of different classes.
        needs: names of parts of the model to fold even if no visitor needs them.
    """

    def __init__(self, model: Model, visitors: Iterable[Visitor[Any]], *, needs: Iterable[str] = ()) -> None:
        self.model = model
        self._visitors = tuple(visitors)
        self._needs = frozenset(needs).union(*(visitor.needs for visitor in self._visitors))
        self.num_events = 0
        """Number of events taken, including one at which something was raised."""
        self._decided = tuple(each.decided for each in self._visitors if type(each).decided is not Visitor.decided)
        self._num_decided = 0
        """Value of `num_events` when `decided` was last called."""
        self._ends_anywhere = False
        self._visits = self._make_visits()

    def _make_visits(self) -> dict[type[e.Event], tuple[Visit, ...]]:
        """Event class → what is called with its events: folds, then methods of visitors."""
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
        """Take the next events, in the order of the log: each observation together with all decisions that it caused.

        Raises:
            Exception: a fold or a visitor raised it at the event in `model.moment`. Take no more events after that.
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
        """Return the state of the model and the visitors. `core_fingerprint`: fingerprint of the core for this log."""
        visitors = {_name(visitor): StoredState.of(visitor, visitor.state) for visitor in self._visitors}
        layout = self._layout(core_fingerprint)
        return _encode(StoredReader(layout, hash_of_reader(), self.model.stored(), visitors))

    def resume(self, stored: bytes, core_fingerprint: str, *, trusts_other_code: bool = False) -> None:
        """Restore a state that `capture` returned. Call this before the first event.

        Captured states of visitors that this reader does not have are ignored.

        Args:
            stored: the bytes that `capture` returned.
            core_fingerprint: the fingerprint of the core for this log.
            trusts_other_code: whether to accept a state of the same layout that other code computed.

        Raises:
            NotResumable: the state was captured by other code, with another configuration, or without one of these
                visitors, or the bytes are no captured state. Do not use this reader after that.
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
        except Exception as error:  # a state that no log leads to may raise anything
            message = f"the stored state cannot be used: {type(error).__name__}: {error}"
            raise NotResumable(message) from error

    def _check(self, there: StoredReader, core_fingerprint: str, *, trusts_other_code: bool) -> None:
        if there.layout != self._layout(core_fingerprint):
            raise NotResumable("it was stored for another configuration or in another layout")
        if there.code != hash_of_reader() and not trusts_other_code:
            raise NotResumable("other code stored it")

    def _layout(self, core_fingerprint: str) -> str:
        """Return a hash of what must be equal for a stored state to keep its meaning. Code is not included."""
        return digest(core_fingerprint, attrs.asdict(self.model.configuration), layout_of(StoredModel))

    def lost(self, first_sequence: int, last_sequence: int) -> None:
        """Forget the state that these events may have changed. They are in a gap, or precede the first event read."""
        self.model.lost()
        self._ends_anywhere = True
        self._visits = self._make_visits()
        for visitor in self._visitors:
            visitor.lost(first_sequence, last_sequence)

    def finish(self) -> None:
        """Call `finish` of each visitor after the last event of the log."""
        for visitor in self._visitors:
            visitor.finish()


def _name(visitor: Visitor[Any]) -> str:
    return type(visitor).__qualname__
