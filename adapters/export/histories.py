"""Some requests event by event in words, and the events that were named as evidence: a second reading of a log."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs

from kvledger.adapters.logs.log import StoredLog
from kvledger.adapters.logs.selection import Selection
from kvledger.adapters.logs.timeline import Group, Timeline, known
from kvledger.lifecycle import events as e

_MAX_GROUPS = 500
"""Of one request that are kept: its first and its last ones."""


@attrs.frozen
class History:
    """All incarnations of one request id, in groups of events."""

    groups: Sequence[Group]
    num_left_out: int
    """Groups between the first and the last ones."""


def read_histories(
    log: StoredLog, selection: Selection, request_ids: Collection[str], evidence: Collection[int]
) -> tuple[dict[str, History], dict[int, e.Event]]:
    """The histories of these requests by id, and the events with these numbers.

    All timelines share one fold, and only those of requests that are there now are asked.
    """
    shared = known(log.core, log.configuration)
    timelines = {name: Timeline(log.configuration, name, shared) for name in request_ids}
    active: dict[str, Timeline] = {}
    events: dict[int, e.Event] = {}
    for batch in log.batches(selection.last_sequence):
        if batch.gap is not None:
            for timeline in active.values():
                timeline.lose(batch.gap)
        for sequence, event in batch.numbered():
            if sequence in evidence:
                events[sequence] = event
            own = getattr(event, "request_id", "")
            if own in timelines:
                active[own] = timelines[own]
            for name, timeline in tuple(active.items()):
                timeline.look(sequence, event)
                # Who is gone has seen its end by the next observation.
                if not event.is_decision and name != own and shared.tracker.get(name) is None:
                    del active[name]
            try:
                shared.fold(event, sequence)
            except Exception:  # noqa: BLE001 -- the first reading has said so
                return _histories(timelines, selection), events
    return _histories(timelines, selection), events


def _histories(timelines: dict[str, Timeline], selection: Selection) -> dict[str, History]:
    histories = {}
    for name, timeline in timelines.items():
        timeline.finish()
        groups = [group for group in timeline.groups if group.last_sequence >= selection.first_sequence]
        num_left_out = max(0, len(groups) - 2 * _MAX_GROUPS)
        kept = [*groups[:_MAX_GROUPS], *groups[-_MAX_GROUPS:]] if num_left_out else groups
        histories[name] = History(kept, num_left_out)
    return histories
