"""What went wrong in a log, for one request or for any.

It knows rules and events. It must not know how a test is written of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import attrs

from kvledger.adapters.repro.reenactment import Watch, rule_of
from kvledger.lifecycle import Core, LedgerConfiguration, SequencedEvent, batches
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Violation


@attrs.frozen
class Incident:
    """A rule that was broken, or a hook that failed, for the first time."""

    rule: str
    """Its name, or `HOOK_FAILED`."""
    sequence: int
    request_id: str
    """Empty where it belongs to no single request."""
    detail: str
    besides: tuple[str, ...]
    """Other rules that were broken up to there."""


@attrs.define
class Findings:
    """All that is wrong with a log."""

    incidents: list[Incident] = attrs.field(factory=list)
    """Of the request that was asked for: the first breach of each rule."""
    others: Counter[str] = attrs.field(factory=Counter)
    """Request id -> breaches that are not its own; empty where they belong to no request."""
    is_known: bool = False
    """Whether the request is in the log at all."""
    has_diverged: bool = False
    """Whether today's code decides otherwise than the log."""


def find_incidents(
    configuration: LedgerConfiguration,
    events: Iterable[SequencedEvent],
    request_id: str | None,
    core: Core | None = None,
) -> Findings:
    """Audit a log and look for what concerns a request.

    Args:
        configuration: of the log.
        events: all of them, or those up to where one may look.
        request_id: whose incidents; None for anybody's.
        core: that of the engine; default: the standard one.
    """
    watch = Watch(configuration, core or Core.standard())
    findings = Findings(is_known=request_id is None)
    concerned: list[Violation] = []
    everything: list[Violation] = []
    holders = _Holders()
    for batch in batches(events):
        violations = watch.take(batch)
        for _, event in batch:
            holders.take(event)
            findings.is_known |= getattr(event, "request_id", None) == request_id
        everything += violations
        event_of = dict(batch)
        for violation in violations:
            if request_id is None or holders.concerns(violation, event_of.get(violation.sequence), request_id):
                concerned.append(violation)
            else:
                findings.others[violation.request_id] += 1
    findings.has_diverged = bool(watch.audit.divergences or watch.audit.unfoldable)
    for violation in concerned:
        rule = rule_of(violation)
        if rule in {incident.rule for incident in findings.incidents}:
            continue
        besides = {rule_of(other) for other in everything if other.sequence <= violation.sequence} - {rule}
        findings.incidents.append(
            Incident(rule, violation.sequence, violation.request_id, violation.detail, tuple(sorted(besides)))
        )
    return findings


class _Holders:
    """Who a breach that names no request concerns."""

    def __init__(self) -> None:
        self._holding: set[str] = set()

    def take(self, event: e.Event) -> None:
        """Take up one event."""
        if isinstance(event, e.BlocksAllocated):
            self._holding.add(event.request_id)
        elif isinstance(event, e.RequestPreempted | e.RequestFinished):
            self._holding.discard(event.request_id)

    def concerns(self, violation: Violation, event: e.Event | None, request_id: str) -> bool:
        """A failure of a step concerns whoever has blocks, an eviction the request it was for."""
        if violation.request_id:
            return violation.request_id == request_id
        if isinstance(event, e.HookFailed):
            return request_id in self._holding
        return getattr(event, "request_id", "") in {"", request_id}
