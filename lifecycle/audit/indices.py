"""What several checkers look up, folded once for all of them, and apart from the projections."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.committed_chunks import CommittedChunks
from kvledger.lifecycle.audit.saved_tails import SavedTails
from kvledger.lifecycle.audit.settled_tokens import SettledTokens
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.replay import Check


@attrs.frozen
class Indices:
    """The audit's own indices. They contain an event before any checker is asked about it."""

    configuration: LedgerConfiguration
    settled: SettledTokens = attrs.field(factory=SettledTokens, init=False)
    committed: CommittedChunks = attrs.field(factory=CommittedChunks, init=False)
    tails: SavedTails = attrs.field(factory=SavedTails, init=False)

    def begin(self, projections: Projections) -> None:
        """Take over what is believed where an audit starts in the middle of a log."""
        tracker = projections.tracker
        self.settled.begin({record.request_id: tracker.num_computed_tokens(record) for record in tracker})
        self.committed.begin(projections)
        self.tails.begin(projections)

    def folds(self) -> Iterable[tuple[type[e.Event], Check]]:
        """(event class, fold), to be done before the checks of that class."""
        return [*self.settled.folds(), *self.committed.folds(), *self.tails.folds()]
