"""Finds what went wrong in a log, for one request or for all requests.

This module depends on rules and events, and not on how a test is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import attrs

from kvledger.adapters.lab.repro.outcome import Trouble, Watch
from kvledger.lifecycle import Core, LedgerConfiguration, SequencedEvent, batches
from kvledger.lifecycle import events as e


@attrs.define
class Findings:
    """Everything that was found to be wrong in a log."""

    incidents: list[Trouble] = attrs.field(factory=list)
    """For each rule, the first breach that concerns the chosen request, or any request if none was chosen."""
    others: Counter[str] = attrs.field(factory=Counter)
    """Id of a request that was not chosen → number of its breaches. For an empty id: breaches of no single request."""
    first_breaches: dict[str, int] = attrs.field(factory=dict)
    """Rule → sequence number of the event at which the rule was first broken, for any request."""
    is_known: bool = False
    """Whether the chosen request is in the log. True if no request was chosen."""
    has_diverged: bool = False
    """Whether today's code makes other decisions than the log has, or cannot fold the log."""


def find_incidents(
    configuration: LedgerConfiguration, events: Iterable[SequencedEvent], request_id: str | None, core: Core
) -> Findings:
    """Audit a log. For each rule, find the first breach that concerns `request_id`, or any request if this is None."""
    watch = Watch(configuration, core)
    findings = Findings(is_known=request_id is None)
    holding: set[str] = set()
    for batch in batches(events):
        troubles = watch.take(batch)
        for _, event in batch:
            if isinstance(event, e.BlocksAllocated):
                holding.add(event.request_id)
            elif isinstance(event, e.RequestPreempted | e.RequestFinished):
                holding.discard(event.request_id)
            findings.is_known |= getattr(event, "request_id", None) == request_id
        event_of = dict(batch)
        for trouble in troubles:
            findings.first_breaches.setdefault(trouble.rule, trouble.sequence)
            if request_id is not None and not _concerns(request_id, trouble, event_of.get(trouble.sequence), holding):
                findings.others[trouble.request_id] += 1
            elif trouble.rule not in {incident.rule for incident in findings.incidents}:
                findings.incidents.append(trouble)
    findings.has_diverged = bool(watch.audit.divergences or watch.audit.unfoldable)
    return findings


def _concerns(request_id: str, trouble: Trouble, event: e.Event | None, holding: set[str]) -> bool:
    """Whether a breach concerns a request. A failed hook that names no request concerns all requests with blocks."""
    if trouble.request_id:
        return trouble.request_id == request_id
    if isinstance(event, e.HookFailed):
        return request_id in holding
    return getattr(event, "request_id", "") in {"", request_id}
