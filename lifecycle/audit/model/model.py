"""What the audit knows of a log: folded once for all checkers, from observations and recorded decisions alone."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.model.chunks import Chunks
from kvledger.lifecycle.audit.model.forgotten import Forgotten
from kvledger.lifecycle.audit.model.jobs import JobsInFlight
from kvledger.lifecycle.audit.model.lives import Lives
from kvledger.lifecycle.audit.model.promises import Promises
from kvledger.lifecycle.audit.model.settled import SettledTokens
from kvledger.lifecycle.audit.model.slots import Slots
from kvledger.lifecycle.audit.model.tables import Tables
from kvledger.lifecycle.audit.model.tails import Tails
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.geometry import Geometry
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.replay import Check


@attrs.frozen
class Model:
    """The audit's own state. It contains an event before any checker is asked about it."""

    core: Core
    configuration: LedgerConfiguration
    geometry: Geometry
    forgotten: Forgotten
    lives: Lives
    tables: Tables
    jobs: JobsInFlight
    settled: SettledTokens
    slots: Slots
    chunks: Chunks
    tails: Tails
    promises: Promises

    @classmethod
    def of(cls, core: Core, configuration: LedgerConfiguration) -> Model:
        """Before the first event."""
        geometry = Geometry(configuration.block_size, configuration.chunk_size, configuration.windows)
        lives, slots = Lives(core, geometry.chunk_size), Slots(configuration.num_slots)
        jobs = JobsInFlight(lives, geometry, configuration.num_ranks)
        return cls(
            core=core,
            configuration=configuration,
            geometry=geometry,
            forgotten=Forgotten(),
            lives=lives,
            tables=Tables(lives),
            jobs=jobs,
            settled=SettledTokens(lives),
            slots=slots,
            chunks=Chunks(jobs, geometry, slots),
            tails=Tails(lives, slots),
            promises=Promises(lives, geometry.chunk_size, keep_for_preempted=configuration.keep_for_preempted),
        )

    def begin(self, projections: Projections) -> None:
        """Take over what is known where an audit starts in the middle of a log."""
        self.lives.begin(projections)
        self.tables.begin(projections)
        self.jobs.begin(projections)
        self.settled.begin()
        self.chunks.begin(projections)
        self.tails.begin(projections)
        self.promises.begin(projections)

    def folds(self) -> Iterable[tuple[type[e.Event], Check]]:
        """(event class, fold), to be done before the checks of that class."""
        # Blocks and tails first, which ask whose they are; then the lives, which may be over; the jobs before the
        # chunks, which ask what was saved.
        return [
            *self.forgotten.folds(),
            *self.tables.folds(),
            *self.tails.folds(),
            *self.promises.folds(),
            *self.lives.folds(),
            *self.jobs.folds(),
            *self.settled.folds(self.forgotten),
            *self.chunks.folds(),
        ]
