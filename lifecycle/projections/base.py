"""What every projection is: a small fold of the log. Here is also what a fold is told of an event: its subject."""

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
    """The generation and the states of a request before an observation was folded."""

    generation: int
    state: RequestState
    blocks: BlocksRegion
    first: FirstRegion
    current: CurrentRegion
    trust: TrustRegion


class Subject(msgspec.Struct, frozen=True, gc=False):
    """What an event is about, and whether states refuse it; found once, before the event is folded.

    An observation is about the present life of its id; at `RequestArrived` that is the life before. A decision is about
    the life that it names, until that is released.
    """

    request: RequestRecord | None = None
    """None if it is unknown, and for events that concern no single request."""
    current: RequestRecord | None = None
    """The request, if it is in the generation that a decision names; always so for observations."""
    trigger: str = ""
    """What the event is to the tables; empty if there is no request."""
    before: Before | None = None
    """The states of the request before the event; None for decisions."""
    is_refused: bool = False
    """Whether the states of the request refuse the observation. Only the closed part of the gating is folded then."""
    refused_rows: Mapping[int, Before] = MappingProxyType({})
    """Ordinal → states of requests that a step schedules although their states refuse that. The step is folded."""
    copy: Copy | None = None
    """The copy that the event settles; None if it is not in flight, and for other events."""


NOBODY = Subject()


class Projection:
    """One fold of the log; to be derived from. Its methods marked `@on(...)` are called with an event and its sequence.

    Those of the core are also given the event's `Subject`. A projection that remembers anything has `state`: a struct
    of plain fields, and the only place where they are listed.
    """

    def index(self) -> None:
        """Make anew what follows from the state; called when the states of all projections are there."""

    def check(self) -> None:
        """Check what folds rely on and types do not say; called with a state that was read, before `index`.

        Raises:
            ValueError: no fold leads to such a state, and a later one might fail on it.
        """

    def folds(self) -> dict[type[Event], Fold]:
        """Event class → fold, called as `fold(event, sequence)`; of the core, as `fold(event, sequence, subject)`.

        Raises:
            TypeError: two methods fold the same events, which of them first would not be said.
        """
        folds = marked(self)
        if len(dict(folds)) < len(folds):
            message = f"{type(self).__qualname__} has two methods for the same events; let one call the other"
            raise TypeError(message)
        return dict(folds)
