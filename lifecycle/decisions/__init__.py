"""What is decided, one room per subject; the state handlers choose which of them applies.

Every function here is a generator of decisions. The ledger folds each decision before it asks for the next,
so a generator always sees the effect of what it has decided so far. Only these rooms may refuse.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvledger.lifecycle.events import Event

Decisions = Iterator[Event]
