"""Replay: fold a stored log into the state at any point, and decide everything again.

Folding needs no decision to be made: decisions are events too. Deciding again is the test of today's code
against what was recorded; the first divergence is reported, and folding goes on with what was recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.decider import Decider
from kvledger.lifecycle.events import Event, RequestArrived, RequestEvent
from kvledger.lifecycle.handlers import HandlerRegistry
from kvledger.lifecycle.machine import ReferenceMachine
from kvledger.lifecycle.states import RequestState

SequencedEvent = tuple[int, Event]


@attrs.frozen
class Divergence:
    """Where today's code decides otherwise than the log. `sequence` is that of the recorded event."""

    sequence: int
    recorded: Event | None
    decided: Event | None

    def __str__(self) -> str:
        recorded = "nothing" if self.recorded is None else str(self.recorded)
        decided = "nothing" if self.decided is None else str(self.decided)
        return f"at sequence {self.sequence} the log has {recorded}, this code decides {decided}"


def fold(events: Iterable[SequencedEvent], configuration: LedgerConfiguration, *, at: int | None = None) -> Projections:
    """The state after the event with sequence number `at`, or after the last one."""
    projections = Projections(configuration)
    for sequence, event in events:
        if at is not None and sequence > at:
            break
        projections.fold(event, sequence)
    return projections


@attrs.define
class ReplayedEvent:
    """One event while it is replayed, with what checkers want to know about its moment."""

    sequence: int
    event: Event
    state_before: RequestState | None
    state_after: RequestState | None


class Replay:
    """Folds events one by one while deciding them again and walking the reference machine along."""

    def __init__(
        self,
        configuration: LedgerConfiguration,
        *,
        handlers: HandlerRegistry | None = None,
        reference: ReferenceMachine | None = None,
    ) -> None:
        self.projections = Projections(configuration)
        self.divergences: list[Divergence] = []
        self.reference_differences: list[Divergence] = []
        self._decider = Decider(self.projections, handlers or HandlerRegistry())
        self._reference = reference
        self._expected: Iterator[Event] | None = None
        self._last_sequence = 0

    def step(self, sequence: int, event: Event) -> ReplayedEvent:
        """Take up the next event of the log."""
        if event.is_decision:
            self._compare(sequence, event)
        else:
            self._expect_no_more(sequence)
        state_before = self._decider.state_of(event)
        self.projections.fold(event, sequence)
        state_after = self._decider.state_of(event)
        is_birth = isinstance(event, RequestArrived)  # a birth is no row of the table, also where an id is used again
        if isinstance(event, RequestEvent) and not is_birth and state_before is not None:
            self._walk_reference(sequence, event, state_before, state_after)
        if not event.is_decision:
            self._expected = self._decider.decide(event, sequence, state_before)
        self._last_sequence = sequence
        return ReplayedEvent(sequence, event, state_before, state_after)

    def finish(self) -> None:
        """Notice decisions that are missing at the end of the log."""
        self._expect_no_more(self._last_sequence + 1)

    def _compare(self, sequence: int, event: Event) -> None:
        if self._expected is None:
            return
        decided = next(self._expected, None)
        if decided != event:
            self.divergences.append(Divergence(sequence, event, decided))
            # Further decisions of this observation were made from another state; they prove nothing.
            self._expected = None

    def _expect_no_more(self, sequence: int) -> None:
        if self._expected is not None:
            decided = next(self._expected, None)
            if decided is not None:
                self.divergences.append(Divergence(sequence, None, decided))
            self._expected = None

    def _walk_reference(
        self, sequence: int, event: RequestEvent, before: RequestState, after: RequestState | None
    ) -> None:
        if self._reference is None or after is None:
            return
        expected = self._reference.next_state(before, type(event)) or before
        if expected is not after and getattr(event, "generation", None) is None:
            self.reference_differences.append(Divergence(sequence, event, None))
