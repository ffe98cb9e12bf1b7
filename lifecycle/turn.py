"""A turn: the object that a handler gets when an observation concerns a request in the handler's state.

Each decision is recorded and folded at once, so the next line of the handler sees its effect. A turn does not know
whether it belongs to a ledger or to a replay.
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
    """Ends a handler whose further decisions do not count. It is not an `Exception`, so handlers do not catch it."""


class EngineTurn(msgspec.Struct, eq=False):
    """A turn for an observation that concerns no single request. The observation is already folded.

    Raises:
        TurnEnded: `decide` raises it if nothing more can be decided. Do not catch it.
    """

    projections: Projections
    """The state folded from the log. Do not change it."""
    decide: Decide
    """Records a decision and folds it."""
    cause: int
    """Sequence number of the observation. Every decision has it as its `cause`."""

    def altered(self, change: Callable[[Event], Event | None]) -> Self:
        """Return a copy of the turn that passes each decision through `change` first.

        If `change` returns None, the decision is dropped.
        """

        def decide(decision: Event) -> None:
            changed = change(decision)
            if changed is not None:
                self.decide(changed)

        turn = copy(self)
        turn.decide = decide
        return turn


class Turn(EngineTurn, eq=False):
    """A turn for an observation that concerns one request."""

    record: RequestRecord
    """The request after the observation."""
    before: Before
    """Generation and states of the request before the observation. `record` has the current ones."""
