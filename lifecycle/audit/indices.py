"""What several checkers look up, folded once for all of them, and apart from the projections."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.committed_chunks import CommittedChunks
from kvledger.lifecycle.audit.saved_tails import SavedTails
from kvledger.lifecycle.audit.settled_tokens import SettledTokens
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.replay import Check


@attrs.frozen
class Indices:
    """The audit's own indices. They contain an event before any checker is asked about it."""

    configuration: LedgerConfiguration
    settled: SettledTokens = attrs.field(factory=SettledTokens, init=False)
    committed: CommittedChunks = attrs.field(factory=CommittedChunks, init=False)
    tails: SavedTails = attrs.field(factory=SavedTails, init=False)

    def folds(self) -> Iterable[tuple[type[e.Event], Check]]:
        """(event class, fold), to be done before the checks of that class."""
        return [*self.settled.folds(), *self.committed.folds(), *self.tails.folds()]
