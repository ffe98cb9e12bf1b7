"""The base class of projections, and `Subject`: the request or copy that an event is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from kvledger.lifecycle.events import Event
from kvledger.lifecycle.marks import marked
from kvledger.lifecycle.projections.copies import Copy
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.states import BlocksRegion, CurrentRegion, FirstRegion, RequestState, TrustRegion

Fold = Callable[..., None]


class Before(msgspec.Struct, frozen=True, gc=False):
    """A request's generation and states before an observation was folded."""

    generation: int
    state: RequestState
    blocks: BlocksRegion
    first: FirstRegion
    current: CurrentRegion
    trust: TrustRegion


class Subject(msgspec.Struct, frozen=True, gc=False):
    """The request or copy that an event is about, found before the event is folded.

    An observation is about the current life of its request id; `RequestArrived` is about the previous life. A decision
    is about the life that it names, until that life is released.
    """

    request: RequestRecord | None = None
    """Record of the request; None if the request is unknown, or if the event is about no single request."""
    current: RequestRecord | None = None
    """The record in `request`; None if the event is a decision about another generation of the life."""
    trigger: str = ""
    """Trigger of the event in the transition tables; meaningless if `request` is None."""
    before: Before | None = None
    """Generation and states of the request just before an observation; None for decisions."""
    is_refused: bool = False
    """Whether the request's states refuse the observation. For an unknown request: whether some state refuses it.

    Only the projections in `Gating.closed_fold` fold a refused event.
    """
    refused_rows: Mapping[int, Before] = MappingProxyType({})
    """For a step: ordinal → states before the step, for each life that is scheduled although its states refuse that.

    The step is folded anyway.
    """
    copy: Copy | None = None
    """The copy that the event settles; None if the copy is not in flight, or if the event settles no copy."""


NO_SUBJECT = Subject()


class Projection:
    """Part of the state that is computed from the events. In a subclass, methods marked `@on(...)` fold events.

    These methods get the event and its sequence number. In the core's projections, except `Owed`, they also get the
    event's `Subject`. Everything that a projection remembers is in `state`, a struct of plain fields.
    """

    def index(self) -> None:
        """Recompute everything derived from the state. Called after the states of all projections were restored."""

    def check(self) -> None:
        """Check what folds assume about a restored state beyond the types of its fields. Called before `index`.

        Raises:
            ValueError: no fold can have produced this state, and a later fold could fail on it.
        """

    def folds(self) -> dict[type[Event], Fold]:
        """Event class → fold. A fold is called as `fold(event, sequence)`.

        In the core's projections, except `Owed`, a fold also gets the event's subject.

        Raises:
            TypeError: two methods fold the same events, so that their order is undefined.
        """
        folds = marked(self)
        if len(dict(folds)) < len(folds):
            message = (
                f"{type(self).__qualname__} has two methods for the same events; mark one and let it call the other"
            )
            raise TypeError(message)
        return dict(folds)
