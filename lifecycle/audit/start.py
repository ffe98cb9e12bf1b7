"""The state that an audit needs to begin in the middle of a log.

It consists of two states. The replay continues from the state of the projections, the rules continue from the state of
the reader's model. The audit trusts both states and judges only later events.
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
    """State after an event, as bytes. Each audit that begins there restores its own objects from the bytes."""

    state: bytes
    """State of the projections, see `snapshots.capture`."""
    reader: bytes
    """State of the audit's model, see `Reader.capture`."""
    trusts_other_code: bool = False
    """Whether `reader` is accepted even if another version of the code computed it."""

    def projections(self, core: Core, configuration: LedgerConfiguration) -> Projections:
        """Return the projections in the stored state. Raises `SnapshotError` if `state` cannot be used."""
        return restore(core, self.state, configuration)

    def resume(self, model: Model, core: Core) -> None:
        """Restore the stored state into a new model. Raises `NotResumable` if `reader` cannot be used."""
        Reader(model, ()).resume(self.reader, core.fingerprint(), trusts_other_code=self.trusts_other_code)


class StartFolds:
    """Folds a log into the projections and the reader's model, so that an audit can begin after any event.

    Args:
        core: the core for this log.
        configuration: the configuration in the log's header.
        start: the state before the first event; None if the first event is the first one of the log.

    Raises:
        SnapshotError: `start.state` cannot be used.
        NotResumable: `start.reader` cannot be used.
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
        """The event that was folded last, or the event whose fold raised."""

    def take(self, events: Iterable[SequencedEvent]) -> None:
        """Fold the next events. After each observation, `events` must contain all decisions that it caused.

        Raises:
            Exception: a fold raised it at the event in `current`. Fold no more events after that.
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
        """Return the state after the events so far. Call this only if the next event is an observation."""
        return Start(capture(self.projections), self._reader.capture(self._core.fingerprint()))
