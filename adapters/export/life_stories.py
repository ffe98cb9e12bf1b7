"""The lives of some requests, event by event in words, and the events that were named as evidence: a second reading."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs

from kvledger.adapters.logs.log import Gap, StoredLog
from kvledger.adapters.logs.selection import Selection
from kvledger.adapters.logs.timeline import Group, Timeline, known
from kvledger.lifecycle import Projections
from kvledger.lifecycle import events as e

_MAX_GROUPS = 500
"""Of one request that are kept: its first and its last ones."""


@attrs.define
class LifeStories:
    """What was found."""

    groups: dict[str, list[Group]] = attrs.field(factory=dict)
    """Request id -> all its lives in groups of events."""
    num_left_out: dict[str, int] = attrs.field(factory=dict)
    """Request id -> groups between the first and the last ones that were left out."""
    evidence: dict[int, e.Event] = attrs.field(factory=dict)

    def take(self, timelines: Mapping[str, Timeline], first_sequence: int) -> None:
        """Take over what the timelines have, from an event on."""
        for name, timeline in timelines.items():
            timeline.finish()
            groups = [group for group in timeline.groups if group.last_sequence >= first_sequence]
            self.num_left_out[name] = max(0, len(groups) - 2 * _MAX_GROUPS)
            self.groups[name] = [*groups[:_MAX_GROUPS], *groups[-_MAX_GROUPS:]] if self.num_left_out[name] else groups


def read_stories(
    log: StoredLog, selection: Selection, request_ids: Collection[str], evidence: Collection[int]
) -> LifeStories:
    """Read the log again; all timelines share one fold, and only those of known requests are asked."""
    shared = known(log.core, log.configuration)
    timelines = {name: Timeline(log.configuration, name, shared) for name in request_ids}
    active: dict[str, Timeline] = {}
    stories = LifeStories()
    expected = 1
    for sequence, event in log.events():
        if selection.is_over(sequence):
            break
        if sequence in evidence:
            stories.evidence[sequence] = event
        if sequence != expected:
            for timeline in active.values():
                timeline.lose(Gap(expected, sequence - 1))
        expected = sequence + 1
        own = getattr(event, "request_id", "")
        if own in timelines:
            active[own] = timelines[own]
        _look(active, shared, sequence, event)
        try:
            shared.fold(event, sequence)
        except Exception:  # noqa: BLE001 -- the first reading has said so
            break
    stories.take(timelines, selection.first_sequence)
    return stories


def _look(active: dict[str, Timeline], shared: Projections, sequence: int, event: e.Event) -> None:
    """Show the event to the timelines; those of requests that are gone have seen their end by the next observation."""
    own = getattr(event, "request_id", "")
    for name, timeline in tuple(active.items()):
        timeline.look(sequence, event)
        if not event.is_decision and name != own and shared.tracker.get(name) is None:
            del active[name]
