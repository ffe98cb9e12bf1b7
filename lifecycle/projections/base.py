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

    An observation is about the current life of its request id, `RequestArrived` about the previous life. A decision is
    about the life that it names, until that life is released.
    """

    request: RequestRecord | None = None
    """None if the request is unknown, and for events about no single request."""
    current: RequestRecord | None = None
    """The request, unless a decision names another generation."""
    trigger: str = ""
    """The event's name in the transition tables; empty if there is no request."""
    before: Before | None = None
    """State and blocks of the request just before the event; None for decisions."""
    is_refused: bool = False
    """Whether the request's states refuse the observation; also if the request is unknown and the event can be refused.

    Only the projections in `Gating.closed_fold` fold a refused event.
    """
    refused_rows: Mapping[int, Before] = MappingProxyType({})
    """Ordinal → states of a request before a step that schedules it although these states refuse that.

    The step is folded anyway.
    """
    copy: Copy | None = None
    """The copy that the event settles; None if that copy is not in flight, and for other events."""


NO_SUBJECT = Subject()


class Projection:
    """One fold of the log. Subclass it: methods marked `@on(...)` are called with an event and its sequence number.

    In the core's projections, except `Owed`, these methods also get the event's `Subject`. Everything that a projection
    remembers is in `state`, a struct of plain fields.
    """

    def index(self) -> None:
        """Recompute everything derived from the state, once the states of all projections are in place."""

    def check(self) -> None:
        """Check a restored state, before `index`, for conditions that folds rely on and types do not express.

        Raises:
            ValueError: no fold produces such a state, and a later fold could fail on it.
        """

    def folds(self) -> dict[type[Event], Fold]:
        """Event class → fold, called as `fold(event, sequence)`; in the core, except `Owed`, also with the subject.

        Raises:
            TypeError: two methods fold the same events, so their order is undefined.
        """
        folds = marked(self)
        if len(dict(folds)) < len(folds):
            message = (
                f"{type(self).__qualname__} has two methods for the same events; mark one and let it call the other"
            )
            raise TypeError(message)
        return dict(folds)
