"""The ledger: append, fold, answer. The only mutable object of the core.

One writer: the scheduler-side connector. It gives observations and gets decisions back; everything both sides
ever know is in the events. The ledger reads no clock and does no I/O: times come with the observations, bytes
go to the sink it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvledger.lifecycle.codec import EventEncoder
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.decider import Decider
from kvledger.lifecycle.errors import described, raise_if_unstoppable
from kvledger.lifecycle.events import Event, HookFailed
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.base import Subject
from kvledger.lifecycle.projections.copies import Channel, Ready
from kvledger.lifecycle.turn import TurnEnded


class EventSink(Protocol):
    """Where committed events go; `kvledger.storage.events` has several."""

    @property
    def next_sequence(self) -> int:
        """The sequence number of the next event."""

    def append(self, payload: bytes, num_events: int, *, expected_sequence: int | None = None) -> int:
        """Store one frame, all of it or nothing; returns the sequence number of its first event."""


class LedgerCorrupt(RuntimeError):
    """A projection failed to fold: its state can no longer be trusted, nothing is decided any more.

    Args:
        message: what failed, and where.
        decisions: what the observation had led to until then; recorded, so they are to be carried out.
    """

    def __init__(self, message: str, decisions: Sequence[Event] = ()) -> None:
        super().__init__(message)
        self.decisions = tuple(decisions)


class Ledger:
    """Append-only: `observe` adds, nothing takes back.

    With `projections` it goes on from the state before `next_sequence`.
    """

    def __init__(
        self,
        core: Core,
        configuration: LedgerConfiguration,
        sink: EventSink,
        *,
        projections: Projections | None = None,
        next_sequence: int | None = None,
    ) -> None:
        self.core = core
        self.projections = core.new_projections(configuration) if projections is None else projections
        self._decider = Decider(core, self.projections, self._decide)
        self._sink = sink
        self._encoder = EventEncoder()
        self._uncommitted: list[Event] = []
        self._next_sequence = sink.next_sequence if next_sequence is None else next_sequence
        self._decisions: list[Event] = []
        """Recorded, and not returned yet."""
        self._corrupt: LedgerCorrupt | None = None
        self._cause = 0
        """The last observation."""
        self._raised = self.projections.extensions.raised
        self.projections.extensions.on_raised = self._stop_extensions
        self.on_recorded: Callable[[Event], None] | None = None
        """Called with each event when it is recorded, while the ledger is sound; must not raise."""

    @property
    def next_sequence(self) -> int:
        """The sequence number that the next event will have."""
        return self._next_sequence

    @property
    def next_ordinal(self) -> int:
        """The ordinal of the next request that arrives; no other life in the log ever had it."""
        return self.projections.tracker.num_arrived

    @property
    def is_corrupt(self) -> bool:
        """Whether a projection failed, so that nothing is decided any more."""
        return self._corrupt is not None

    @property
    def num_uncommitted(self) -> int:
        """Events since the last commit."""
        return len(self._uncommitted)

    def observe(self, event: Event) -> list[Event]:
        """Record an observation, fold it, decide, record and fold the decisions; returns the decisions.

        A corrupt ledger decides nothing; it records what it is given and folds it for what is owed, and for that alone.

        Raises:
            LedgerCorrupt: a projection failed, now. The events stay and will be committed; the error holds the
                decisions among them.
        """
        if self._corrupt is not None:
            sequence = self._next_sequence
            self._next_sequence = sequence + 1
            self._uncommitted.append(event)
            self.projections.fold_owed(event, sequence)
            return []
        deciding = self._decider.deciding[type(event)]
        subject = self.projections.subject_of(event)
        try:
            self._cause = self._next_sequence
            cause = self._record(event, subject)
            if deciding is not None:
                deciding(event, cause, subject)
        except TurnEnded:
            pass  # the ledger has become corrupt
        decisions, self._decisions = self._decisions, []
        if self._corrupt is not None:
            raise self._corrupt
        return decisions

    def ready(self, channel: Channel) -> Ready:
        """What is owed on a channel now. It is owed until `advance`, which belongs into the same hook."""
        return self.projections.owed.ready(channel)

    def advance(self, ready: Ready) -> None:
        """Record that this was handed over; nothing where nothing was owed.

        Raises:
            LedgerCorrupt: see `observe`. That it was handed over is recorded.
        """
        delivered = ready.delivered()
        if delivered is not None:
            self.observe(delivered)

    def commit(self) -> None:
        """Hand the events since the last commit to the sink, as one frame.

        Raises:
            OSError: it could not be written; the events stay for the next commit.
        """
        events = self._uncommitted
        if not events:
            return
        first_sequence = self._next_sequence - len(events)
        try:
            self._sink.append(self._encoded(events), len(events), expected_sequence=first_sequence)
        except OSError:
            raise
        except BaseException as error:
            raise_if_unstoppable(error)
            self._uncommitted = []  # the sink will never take them
            raise
        self._uncommitted = []

    def _encoded(self, events: list[Event]) -> bytes:
        try:
            return self._encoder.encode(events)
        except BaseException as error:  # noqa: BLE001 -- one event that cannot be written must not cost the others their place
            raise_if_unstoppable(error)
            return self._encoder.encode([self._writable(event) for event in events])

    def _writable(self, event: Event) -> Event:
        try:
            self._encoder.encode([event])
        except BaseException as error:  # noqa: BLE001 -- see above
            raise_if_unstoppable(error)
            # Not a note: the log lacks an event, so whoever reads it has to be warned.
            return HookFailed("commit", "", f"{event.id} cannot be encoded: {type(error).__name__}", 0)
        return event

    def _decide(self, decision: Event) -> None:
        if self._corrupt is None:  # what cannot be folded is recorded all the same
            self._decisions.append(decision)
        self._record(decision)

    def _record(self, event: Event, subject: Subject | None = None) -> int:
        if self._corrupt is not None:
            raise TurnEnded
        sequence = self._next_sequence
        self._next_sequence = sequence + 1
        self._uncommitted.append(event)
        if self.on_recorded is not None:
            self.on_recorded(event)
        try:
            self.projections.fold(event, sequence, subject)
        except BaseException as error:
            raise_if_unstoppable(error)
            message = f"folding {event.id} at sequence {sequence} failed: {described(error)}"
            self._corrupt = LedgerCorrupt(message, self._decisions)
            self._corrupt.__cause__ = error
            raise TurnEnded from error
        if self._raised:
            self._stop_extensions()
        return sequence

    def _stop_extensions(self) -> None:
        for decision in self.projections.extensions.stops(self._cause):
            self._decide(decision)
