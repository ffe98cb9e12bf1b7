"""What is wrong with a log, as a page lists it: with the events that prove it, and with no more than a person reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from kvledger.adapters.tools.logs.describe import event_text, violation_place
from kvledger.adapters.tools.logs.histories import NamedEvent
from kvledger.adapters.tools.logs.verification import Findings
from kvledger.lifecycle.audit import Judgement, Violation

MAX_FINDINGS = 50


@attrs.frozen
class Finding:
    """Something wrong, with what proves it: (event number, text)."""

    title: str
    detail: str
    evidence: Sequence[tuple[int, str]] = ()
    request_id: str = ""
    """Of the request that it is about, where it is about one."""


def evidence(found: Findings) -> set[int]:
    """The events that prove the broken rules that are listed."""
    return {sequence for item in _listed(found.judgement) for sequence in (*item.evidence, item.sequence)}


def listed(found: Findings, proof: Mapping[int, NamedEvent]) -> tuple[list[Finding], int]:
    """The first findings, and how many there are besides; `proof` has the events of `evidence`."""
    judgement = found.judgement
    findings = [
        *(Finding(trouble, "") for trouble in found.of_workers),
        *(Finding(f"Extension {each.extension} was stopped", each.text) for each in found.stopped),
        *(Finding(damage.place, damage.detail) for damage in found.damage),
        *_breaches(_listed(judgement), proof),
        *_divergences(judgement),
    ]
    diverged = (judgement.divergences, judgement.reference_differences)
    num_diverged = sum(each.num_found for each in diverged) + (judgement.unfoldable is not None)
    num_broken = sum(judgement.num_violations.values())
    num_found = len(found.of_workers) + len(found.stopped) + len(found.damage) + num_broken + num_diverged
    return findings[:MAX_FINDINGS], num_found - len(findings[:MAX_FINDINGS])


def _listed(judgement: Judgement) -> Sequence[Violation]:
    return judgement.violations[:MAX_FINDINGS]


def _breaches(violations: Sequence[Violation], proof: Mapping[int, NamedEvent]) -> Iterator[Finding]:
    for item in violations:
        named = dict.fromkeys((*item.evidence, item.sequence))
        events = [(sequence, event_text(proof[sequence].event)) for sequence in named if sequence in proof]
        yield Finding(violation_place(item), item.detail, events, item.request_id)


def _divergences(judgement: Judgement) -> Iterator[Finding]:
    if judgement.unfoldable is not None:
        yield Finding("An event that cannot be folded", str(judgement.unfoldable))
    for divergence in (*judgement.divergences, *judgement.reference_differences):
        sides = [
            (divergence.sequence, f"{who}: {'nothing' if event is None else event_text(event)}")
            for who, event in (("recorded", divergence.recorded), ("decided today", divergence.decided))
        ]
        yield Finding(f"Today's code decides otherwise at event {divergence.sequence}", "", sides)
