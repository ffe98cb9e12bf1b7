"""A turn to decide in: what a handler is given when an observation concerns a request in its state.

What is decided is recorded and folded at once, so the next line sees its effect. A turn knows neither who keeps the
record nor whether something is decided for the first time or again.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Self

import msgspec

from kvledger.lifecycle.errors import Unstoppable
from kvledger.lifecycle.events import Event
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.base import Before
from kvledger.lifecycle.projections.request_record import RequestRecord

Decide = Callable[[Event], object]


class TurnEnded(Unstoppable):
    """Unwinds a handler whose further decisions do not count. No `Exception`, so that no handler takes it for one."""


class EngineTurn(msgspec.Struct, eq=False):
    """An observation that concerns no single request, folded already.

    Raises:
        TurnEnded: by `decide`, where nothing more can be decided; not to be caught.
    """

    projections: Projections
    """Everything that is known, to be read only."""
    decide: Decide
    """Record a decision and fold it."""
    cause: int
    """Sequence number of the observation, which every decision names."""

    def altered(self, change: Callable[[Event], Event | None]) -> Self:
        """The same turn, in which `change` is given each decision before it is made; None drops it."""

        def decide(decision: Event) -> None:
            changed = change(decision)
            if changed is not None:
                self.decide(changed)

        turn = copy(self)
        turn.decide = decide
        return turn


class Turn(EngineTurn, eq=False):
    """What an observation means for one request."""

    record: RequestRecord
    """The request, in the states that the observation led to."""
    before: Before
    """Its generation and states before the observation was folded: what it had. `record` says what it has now."""
