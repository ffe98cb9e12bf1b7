"""An observation with everything that was decided upon it: what a log is made of, and what a reader is shown as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from kvledger.lifecycle import Projections, SequencedEvent
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

    def in_full(self, known: Projections) -> Observation:
        """The same with what repeated lookups stand for; to be asked before it is folded into `known`."""
        if not any(isinstance(event, e.RepeatedLookup) for _, event in self):
            return self
        in_full = known.lookup_cache.in_full
        return Observation(
            self.sequence, in_full(self.event), [(number, in_full(each)) for number, each in self.decisions]
        )

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
