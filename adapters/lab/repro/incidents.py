"""What went wrong in a log, for one request or for any.

It knows rules and events. It must not know how a test is written of it.
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
    """All that is wrong with a log."""

    incidents: list[Trouble] = attrs.field(factory=list)
    """Of the request that was asked for: the first breach of each rule."""
    others: Counter[str] = attrs.field(factory=Counter)
    """Request id -> breaches that are not its own; empty where they belong to no request."""
    first_breaches: dict[str, int] = attrs.field(factory=dict)
    """Rule -> the event at which anybody broke it first."""
    is_known: bool = False
    """Whether the request is in the log at all."""
    has_diverged: bool = False
    """Whether today's code decides otherwise than the log."""


def find_incidents(
    configuration: LedgerConfiguration, events: Iterable[SequencedEvent], request_id: str | None, core: Core
) -> Findings:
    """Audit a log and look for what concerns a request.

    Args:
        configuration: of the log.
        events: all of them, or those up to where one may look.
        request_id: whose incidents; None for anybody's.
        core: that of the engine.
    """
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
    """A failure of a step concerns whoever has blocks, an eviction the request it was for."""
    if trouble.request_id:
        return trouble.request_id == request_id
    if isinstance(event, e.HookFailed):
        return request_id in holding
    return getattr(event, "request_id", "") in {"", request_id}
