"""Describes chosen requests event by event, in a second reading of a log."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs

from kvledger.adapters.tools.logs.histories import NamedEvents
from kvledger.adapters.tools.logs.log import Place, StoredLog
from kvledger.adapters.tools.logs.reading import take_batch
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.timeline import Group, begin_timelines
from kvledger.lifecycle.reader import Reader

_MAX_GROUPS = 500
"""Number of groups kept at the beginning, and again at the end, of one request's timeline."""


@attrs.frozen
class RequestTimeline:
    """Groups of events of all lives of one request id."""

    groups: Sequence[Group]
    num_left_out: int
    """Number of entries of `groups` that are not shown, from the middle of the timeline."""


def read_timelines(
    log: StoredLog, selection: Selection, end: Place, request_ids: Collection[str], named: NamedEvents
) -> dict[str, RequestTimeline]:
    """Return request id → timeline, up to `end`. Pass every batch that is read to `named`, too."""
    timelines = begin_timelines(log, request_ids)
    reader = Reader(timelines.model, [timelines])
    for batch in log.batches_so_far(selection.last_sequence, end):
        named.take(batch)
        take_batch(reader, log, batch)
    return {name: _shown(groups, selection) for name, groups in timelines.state.groups.items()}


def _shown(all_groups: Sequence[Group], selection: Selection) -> RequestTimeline:
    groups = [group for group in all_groups if group.last_sequence >= selection.first_sequence]
    num_left_out = max(0, len(groups) - 2 * _MAX_GROUPS)
    return RequestTimeline([*groups[:_MAX_GROUPS], *groups[-_MAX_GROUPS:]] if num_left_out else groups, num_left_out)
