"""A turn: what a handler gets when an observation concerns a request in its state.

Each decision is recorded and folded at once, so the handler's next line sees its effect. A turn does not know whether
something is decided for the first time or in a replay.
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
    """Ends a handler whose further decisions do not count. Not an `Exception`, so that handlers do not catch it."""


class EngineTurn(msgspec.Struct, eq=False):
    """An observation that concerns no single request; it is already folded.

    Raises:
        TurnEnded: by `decide`, if nothing more can be decided. Do not catch it.
    """

    projections: Projections
    """Everything that is known; read only."""
    decide: Decide
    """Records a decision and folds it."""
    cause: int
    """Sequence number of the observation; every decision names it."""

    def altered(self, change: Callable[[Event], Event | None]) -> Self:
        """Return the same turn with each decision passed through `change` first; None drops the decision."""

        def decide(decision: Event) -> None:
            changed = change(decision)
            if changed is not None:
                self.decide(changed)

        turn = copy(self)
        turn.decide = decide
        return turn


class Turn(EngineTurn, eq=False):
    """An observation that concerns one request."""

    record: RequestRecord
    """The request after the observation."""
    before: Before
    """Generation and states of the request before the observation: what it had. `record` has what it has now."""
