"""What is decided, one room per subject; the state handlers choose which of them applies.

Every function here returns an iterator of decisions. The ledger folds each decision before it asks for the next, so a
generator always sees the effect of what it has decided so far. What follows at once from what is believed needs no
generator: it is decided when the function is called, and returned as the iterator of a tuple. So call a room when
the decisions of the one before it are folded, as `yield from` one after the other does. Only these rooms may refuse.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvledger.lifecycle.events import Event

Decisions = Iterator[Event]

NOTHING: Decisions = iter(())
"""No decisions. It is always at its end, so one serves all."""

MADE = type(NOTHING)
"""The type of decisions that are made already, the iterator of a tuple: asking it for the next one cannot fail."""
