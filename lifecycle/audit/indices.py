"""What several checkers look up, folded once for all of them, and apart from the projections."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.committed_chunks import CommittedChunks
from kvledger.lifecycle.audit.forgotten import Forgotten
from kvledger.lifecycle.audit.jobs_in_flight import JobsInFlight
from kvledger.lifecycle.audit.saved_tails import SavedTails
from kvledger.lifecycle.audit.settled_tokens import SettledTokens
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.geometry import Geometry
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.replay import Check


@attrs.frozen
class Indices:
    """The audit's own indices. They contain an event before any checker is asked about it."""

    core: Core
    configuration: LedgerConfiguration
    geometry: Geometry = attrs.field(init=False)
    forgotten: Forgotten = attrs.field(factory=Forgotten, init=False)
    jobs: JobsInFlight = attrs.field(init=False)
    settled: SettledTokens = attrs.field(factory=SettledTokens, init=False)
    committed: CommittedChunks = attrs.field(init=False)
    tails: SavedTails = attrs.field(factory=SavedTails, init=False)

    @geometry.default
    def _geometry(self) -> Geometry:
        sizes = self.configuration
        return Geometry(sizes.block_size, sizes.chunk_size, sizes.windows)

    @jobs.default
    def _jobs(self) -> JobsInFlight:
        return JobsInFlight(self.configuration.num_ranks)

    @committed.default
    def _committed(self) -> CommittedChunks:
        return CommittedChunks(self.jobs, self.geometry)

    def begin(self, projections: Projections) -> None:
        """Take over what is believed where an audit starts in the middle of a log."""
        tracker = projections.tracker
        self.jobs.begin(projections)
        self.settled.begin({record.request_id: tracker.num_computed_tokens(record) for record in tracker})
        self.committed.begin(projections)
        self.tails.begin(projections)

    def folds(self) -> Iterable[tuple[type[e.Event], Check]]:
        """(event class, fold), to be done before the checks of that class."""
        # The jobs first: what a settled save commits is asked of them.
        return [
            *self.forgotten.folds(),
            *self.jobs.folds(),
            *self.settled.folds(self.forgotten),
            *self.committed.folds(),
            *self.tails.folds(self.forgotten),
        ]
