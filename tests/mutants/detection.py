"""Plays a mutant and lets the audit read what it wrote: which rule is named first, and how soon."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable

import attrs

from kvledger.lifecycle import Core
from kvledger.lifecycle.audit import Audit, Violation
from kvledger.lifecycle.audit.rules.jobs import CompletionOnce
from kvledger.lifecycle.audit.rules.recorded import Recorded
from mutants.mutant import Mutant, Touch
from mutants.scenes import Story


@attrs.frozen
class Detection:
    """What the audit said of one seed."""

    seed: int
    touched: int | None
    """Sequence of the first event that the mistake made another, None where it made no difference."""
    found: int | None
    """Sequence of the first violation."""
    first_rules: frozenset[str]
    """Rules that are broken at that very event."""
    rules: dict[str, int]
    """All that the audit named, and how often."""
    detail: str
    num_events: int
    num_divergences: int
    ended_by: str
    unfoldable: str
    """The event that could not be folded, and why: the mutant's patch does not fit the code that it patches."""

    def is_named(self, rule: str) -> bool:
        """Whether the first finding is this rule's, and nobody else speaks of the same event."""
        return self.first_rules == {rule}

    def is_misnamed(self, mutant: Mutant) -> bool:
        """Whether the first finding is wrong; one that the connector itself recorded of the rule is not."""
        is_recorded = self.first_rules == {Recorded.rule} and self.detail.startswith(f"{mutant.rule}:")
        return not is_recorded and not self.first_rules <= {mutant.rule, *mutant.beside}

    @property
    def num_events_until(self) -> int:
        """Events from the first that was touched to the violation, that one included."""
        return 0 if self.found is None or self.touched is None else self.found - self.touched + 1


def audit_of(story: Story) -> Audit:
    """The finished audit of a story's log."""
    audit = Audit(Core.standard(), story.configuration)
    audit.run(story.events)
    return audit


def unexpected(audit: Audit, story: Story) -> list[Violation]:
    """The violations that no fault of the scene causes by itself."""
    return [violation for violation in audit.violations if not _is_caused_by_a_fault(violation, story.allowed_rules)]


def _is_caused_by_a_fault(violation: Violation, allowed_rules: frozenset[str]) -> bool:
    # Faults speak twice and fall silent. A report too many breaks its rule; silence breaks none, as long as it is
    # noticed and recorded.
    if violation.rule == Recorded.rule:
        return violation.detail.partition(":")[0] in allowed_rules
    return violation.rule == CompletionOnce.rule and violation.rule in allowed_rules


def detect(mutant: Mutant, seed: int) -> Detection:
    """Play one seed with the mistake switched on, and audit with it switched on as well."""
    story, touch = play(mutant, seed)
    return judge(mutant, story, touch, seed)


def play(mutant: Mutant, seed: int) -> tuple[Story, Touch]:
    """Play one seed with the mistake switched on."""
    touch = Touch()

    def told(next_sequence: object) -> None:
        touch.next_sequence = next_sequence  # type: ignore[assignment]

    with mutant.switched_on(touch):
        return mutant.scene.play(seed, told), touch


def judge(mutant: Mutant, story: Story, touch: Touch, seed: int) -> Detection:
    """Audit what was written by the code that wrote it, mistake included: one version writes and verifies."""
    with mutant.switched_on(Touch()):
        audit = audit_of(story)
    violations = unexpected(audit, story)
    found = violations[0].sequence if violations else None
    return Detection(
        seed=seed,
        touched=touch.first_sequence,
        found=found,
        first_rules=frozenset(violation.rule for violation in violations if violation.sequence == found),
        rules=dict(Counter(violation.rule for violation in violations)),
        detail=violations[0].detail if violations else "",
        num_events=audit.num_events,
        num_divergences=len(audit.divergences) + len(audit.reference_differences) + (audit.unfoldable is not None),
        ended_by=story.ended_by,
        unfoldable=str(audit.unfoldable or ""),
    )


@attrs.frozen
class Figures:
    """What many seeds of one mutant add up to."""

    num_seeds: int
    num_touched: int
    num_named: int
    """Seeds in which the right rule was named first and alone."""
    num_misnamed: int
    median_events: float | None
    max_events: int | None
    also: dict[str, int]
    """Other rules -> in how many seeds they were named later."""


def figures_of(mutant: Mutant, detections: Iterable[Detection]) -> Figures:
    """Add up."""
    all_seeds = list(detections)
    named = [detection for detection in all_seeds if detection.is_named(mutant.rule)]
    lengths = [detection.num_events_until for detection in named]
    also = Counter(rule for detection in named for rule in detection.rules if rule != mutant.rule)
    return Figures(
        num_seeds=len(all_seeds),
        num_touched=sum(detection.touched is not None for detection in all_seeds),
        num_named=len(named),
        num_misnamed=sum(detection.is_misnamed(mutant) for detection in all_seeds),
        median_events=statistics.median(lengths) if lengths else None,
        max_events=max(lengths) if lengths else None,
        also=dict(also.most_common()),
    )
