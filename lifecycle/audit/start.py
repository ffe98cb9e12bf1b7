"""What has to be known where an audit begins in the middle of a log: the live state there, and the reader's.

Each half of an audit goes on from its own. Both are trusted and not judged; what comes behind is.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.audit.violations import Violations
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.reader.model import EVERY_PART, Model
from kvledger.lifecycle.reader.visitor import Reader
from kvledger.lifecycle.replay import SequencedEvent
from kvledger.lifecycle.snapshots import capture, restore


@attrs.frozen
class Start:
    """What is known after an event, as bytes: whoever goes on from it has objects of its own."""

    state: bytes
    """Of the projections, see `snapshots.capture`."""
    reader: bytes
    """Of the audit's model, see `Reader.capture`."""
    trusts_other_code: bool = False
    """Whether the reader's may have been folded by other code."""

    def projections(self, core: Core, configuration: LedgerConfiguration) -> Projections:
        """The live state. Raises `SnapshotError` where it cannot be used."""
        return restore(core, self.state, configuration)

    def resume(self, model: Model, core: Core) -> None:
        """Let a model know it that has seen no event. Raises `NotResumable` where it cannot be used."""
        Reader(model, ()).resume(self.reader, core.fingerprint(), trusts_other_code=self.trusts_other_code)


class StartFolds:
    """Folds a log both ways, to say after any event how an audit can begin there.

    Args:
        core: of the log.
        configuration: as in its header.
        start: what is known before the first event; default: the log begins here.

    Raises:
        SnapshotError: `start` cannot be used.
        NotResumable: likewise.
    """

    def __init__(self, core: Core, configuration: LedgerConfiguration, start: Start | None = None) -> None:
        self._core = core
        self.model = AuditModel(core.tables, configuration, Violations())
        if start is None:
            self.projections = core.new_projections(configuration)
        else:
            self.projections = start.projections(core, configuration)
            start.resume(self.model, core)
        self._reader = Reader(self.model, (), needs=EVERY_PART)
        self.current: SequencedEvent | None = None
        """The event that was folded last, or raised."""

    def take(self, events: Iterable[SequencedEvent]) -> None:
        """Fold the next events, observations with all of their decisions.

        Raises:
            Exception: whatever a fold raises; `current` says at which event. Nothing more can be taken.
        """
        events = list(events)
        for self.current in events:
            sequence, event = self.current
            self.projections.fold(event, sequence)
        try:
            self._reader.take(events)
        except Exception:
            moment = self.model.moment
            if moment.event is not None:
                self.current = moment.sequence, moment.event
            raise

    def start(self) -> Start:
        """What is known now; to be asked for where an observation comes next."""
        return Start(capture(self.projections), self._reader.capture(self._core.fingerprint()))
