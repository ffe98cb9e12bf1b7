"""Finds the call that is in progress at the end of a log. Extensions say at which event a call begins or ends.

This module must not name any event type.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvledger.lifecycle import Core, SequencedEvent, suppressed
from kvledger.lifecycle import events as e


@attrs.frozen
class UnderWay:
    """Something that has begun and, as far as the log shows, not ended."""

    what: str
    sequence: int
    """Sequence number of the event at which it began."""
    time_ns: int
    """Time of that event since the log was opened."""


def under_way(core: Core, event: e.Event, sequence: int, before: UnderWay | None) -> UnderWay | None:
    """Return what is in progress after an event. `before`: what was in progress before the event."""
    for extension in core.extensions:
        with suppressed():  # an extension's code may raise
            what = extension.under_way(event)
            if what is not None:
                return UnderWay(what, sequence, getattr(event, "time_ns", 0)) if what else None
    return before


def last_under_way(core: Core, events: Iterable[SequencedEvent]) -> UnderWay | None:
    """Return what is in progress after the last of these events."""
    found = None
    for sequence, event in events:
        found = under_way(core, event, sequence, found)
    return found
