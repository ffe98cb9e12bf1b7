"""What an event is about, found once before the event is folded and given to every fold."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from kvledger.lifecycle.states import BlocksRegion, CurrentRegion, FirstRegion, RequestState, TrustRegion

if TYPE_CHECKING:
    from kvledger.lifecycle.projections.request_record import RequestRecord

States = tuple[RequestState, BlocksRegion, FirstRegion, CurrentRegion, TrustRegion]
"""Of a request, in the order of `table.REGIONS`."""


class Before(msgspec.Struct, frozen=True, gc=False):
    """The generation and the states of a request before an observation was folded."""

    generation: int
    state: RequestState
    blocks: BlocksRegion
    first: FirstRegion
    current: CurrentRegion
    trust: TrustRegion

    @classmethod
    def of(cls, request: RequestRecord) -> Before:
        """As they are now."""
        return cls(*_fields_of(request))


class Subject(msgspec.Struct, frozen=True, gc=False):
    """The request of an event.

    An observation is about the present life of its id; at `RequestArrived` that is the life before. A decision is about
    the life that it names, until that is released.
    """

    request: RequestRecord | None = None
    """None where it is unknown, and for events about no single request."""
    before: Before | None = None
    """Its states before the event; None for decisions."""
    is_current: bool = False
    """Whether the request is in the generation that the decision names; always so for observations."""
    is_refused: bool = False
    """Whether the states of the request refuse the observation. Only the closed part of the gating is folded then."""

    @property
    def current(self) -> RequestRecord | None:
        """The request, if it is in the generation that the event concerns."""
        return self.request if self.is_current else None


NOBODY = Subject()
_fields_of: Callable[[RequestRecord], tuple[Any, ...]] = attrgetter(*Before.__struct_fields__)


def states_of(request: RequestRecord) -> States:
    """What a request is in now."""
    return request.state, request.blocks, request.first, request.current, request.trust
