"""What is under way where a log ends, as extensions see it from its events. It must not know what any event means."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvledger.lifecycle import Core, SequencedEvent, suppressed
from kvledger.lifecycle import events as e


@attrs.frozen
class UnderWay:
    """Something that has begun and, as far as the log goes, has not ended."""

    what: str
    """In plain words."""
    sequence: int
    """Of the event since which it is under way."""
    time_ns: int
    """When that was, since the log was opened."""


def under_way(core: Core, event: e.Event, sequence: int, before: UnderWay | None) -> UnderWay | None:
    """What is under way behind an event, where something was before it."""
    for extension in core.extensions:
        with suppressed():  # somebody else's code
            what = extension.under_way(event)
            if what is not None:
                return UnderWay(what, sequence, getattr(event, "time_ns", 0)) if what else None
    return before


def last_under_way(core: Core, events: Iterable[SequencedEvent]) -> UnderWay | None:
    """What is under way behind the last of these events."""
    found = None
    for sequence, event in events:
        found = under_way(core, event, sequence, found)
    return found
