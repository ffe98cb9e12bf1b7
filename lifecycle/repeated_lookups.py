"""Repeated lookups in full, for whoever reads a log's events without folding them.

It remembers the last answers only, not whether they may still be repeated: who wants to know that folds the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvledger.lifecycle import events as e
from kvledger.lifecycle.replay import SequencedEvent


class LookupsInFull:
    """Call it with each event of a log, in order, and it returns what that stands for; mostly the event itself."""

    def __init__(self) -> None:
        self._answers: dict[int, e.LookupAnswered] = {}

    def __call__(self, event: e.Event) -> e.Event:
        """A repetition of what is not known here is returned as it is."""
        if isinstance(event, e.LookupAnswered):
            self._answers[event.ordinal] = event
        elif isinstance(event, e.RequestReleased):
            self._answers.pop(event.ordinal, None)
        elif isinstance(event, e.RepeatedLookup) and (last := self._answers.get(event.ordinal)) is not None:
            return event.after(last)
        return event

    def lose(self) -> None:
        """Events are missing here, other answers perhaps among them."""
        self._answers.clear()


def lookups_in_full(events: Iterable[SequencedEvent]) -> Iterator[SequencedEvent]:
    """A whole log's events under their numbers."""
    in_full = LookupsInFull()
    return ((sequence, in_full(event)) for sequence, event in events)
