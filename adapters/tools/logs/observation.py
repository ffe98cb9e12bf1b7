"""An observation with everything that was decided upon it: what a log is made of, and what a reader is shown as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from kvledger.lifecycle import SequencedEvent
from kvledger.lifecycle import events as e


@attrs.frozen
class Observation:
    """Iterates over its events with their numbers, the observed one first."""

    sequence: int
    event: e.Event
    """A decision where the observation is not in the log."""
    decisions: list[SequencedEvent]

    @property
    def last_sequence(self) -> int:
        """Of its last decision."""
        return self.decisions[-1][0] if self.decisions else self.sequence

    def __iter__(self) -> Iterator[SequencedEvent]:
        yield self.sequence, self.event
        yield from self.decisions


def observations(events: Iterable[SequencedEvent]) -> Iterator[Observation]:
    """The events grouped. The log's frames each hold whole observations."""
    current: Observation | None = None
    for sequence, event in events:
        if current is not None and event.is_decision:
            current.decisions.append((sequence, event))
            continue
        if current is not None:
            yield current
        current = Observation(sequence, event, [])
    if current is not None:
        yield current
