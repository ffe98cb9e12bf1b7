"""Some requests event by event in words, and the events that were named as evidence: a second reading of a log."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs

from kvledger.adapters.logs.log import StoredLog
from kvledger.adapters.logs.observation import observations
from kvledger.adapters.logs.selection import Selection
from kvledger.adapters.logs.timeline import Group, Timelines
from kvledger.lifecycle import events as e

_MAX_GROUPS = 500
"""Of one request that are kept: its first and its last ones."""


@attrs.frozen
class RequestTimeline:
    """All incarnations of one request id, in groups of events."""

    groups: Sequence[Group]
    num_left_out: int
    """Groups between the first and the last ones."""


def read_timelines(
    log: StoredLog, selection: Selection, request_ids: Collection[str], evidence: Collection[int]
) -> tuple[dict[str, RequestTimeline], dict[int, e.Event]]:
    """The timelines of these requests by id, and the events with these numbers."""
    timelines = Timelines(log.core, log.configuration, request_ids)
    events: dict[int, e.Event] = {}
    for batch in log.batches(selection.last_sequence):
        events.update(numbered for numbered in batch.numbered() if numbered[0] in evidence)
        if batch.gap is not None:
            timelines.lose(batch.gap)
        try:
            for observation in observations(batch.numbered()):
                timelines.take(observation)
        except Exception:  # noqa: BLE001 -- the first reading has said so
            break
    return _shown(timelines, selection), events


def _shown(timelines: Timelines, selection: Selection) -> dict[str, RequestTimeline]:
    shown = {}
    for name, all_groups in timelines.groups.items():
        groups = [group for group in all_groups if group.last_sequence >= selection.first_sequence]
        num_left_out = max(0, len(groups) - 2 * _MAX_GROUPS)
        kept = [*groups[:_MAX_GROUPS], *groups[-_MAX_GROUPS:]] if num_left_out else groups
        shown[name] = RequestTimeline(kept, num_left_out)
    return shown
