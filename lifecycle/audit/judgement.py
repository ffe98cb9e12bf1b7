"""What an audit found, as plain data that a process can send to another; and one judgement of what several found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import attrs

from kvledger.lifecycle.audit.violations import MAX_VIOLATIONS, Violation
from kvledger.lifecycle.divergences import Divergences
from kvledger.lifecycle.events import Event


@attrs.frozen
class Unfoldable:
    """An event that today's code cannot fold or check: the log is not one that this code could have written."""

    sequence: int
    event: Event
    error: str

    def __str__(self) -> str:
        return f"at sequence {self.sequence} {self.event.id} cannot be folded: {self.error}"


@attrs.frozen
class RulesHeld:
    """What some rules, in their order, found in a log."""

    num_events: int
    rules: Sequence[str]
    not_judged: Mapping[str, str]
    """Rule of an extension -> why it could not be held against the log, or not against all of it."""
    violations: Sequence[Violation]
    """The first ones."""
    num_violations: Mapping[str, int]
    """Rule -> how often it was broken."""


@attrs.frozen
class DecidedAgain:
    """Where today's code decides and moves otherwise than a part of a log says."""

    divergences: Divergences
    reference_differences: Divergences
    """Where the reference machine goes another way than the compiled table."""
    num_unjudged: int
    """Observations upon which an extension may have decided whose code is not here."""

    def continued(self, following: DecidedAgain) -> DecidedAgain:
        """The same with what the next part of the log has."""
        return DecidedAgain(
            self.divergences.continued(following.divergences),
            self.reference_differences.continued(following.reference_differences),
            self.num_unjudged + following.num_unjudged,
        )


@attrs.frozen
class Judgement:
    """Of a log, up to the event that cannot be folded."""

    held: RulesHeld
    decided: DecidedAgain
    unfoldable: Unfoldable | None = None

    @classmethod
    def of(
        cls,
        rules: Iterable[str],
        held: Sequence[RulesHeld],
        decided: Iterable[DecidedAgain],
        unfoldable: Unfoldable | None = None,
    ) -> Self:
        """One of several, as if it had been made in one pass.

        Args:
            rules: in the order in which they look at an event, and are listed.
            held: what they found in the whole log; each rule stands in one of these.
            decided: of parts of the log, in its order.
            unfoldable: the first event that cannot be folded.
        """
        places = {rule: number for number, rule in enumerate(rules)}

        def place(rule: str) -> int:
            return places.get(rule, len(places))

        every_rule = sorted((rule for each in held for rule in each.rules), key=place)
        violations = [violation for each in held for violation in each.violations]
        violations.sort(key=lambda violation: (violation.sequence, place(violation.rule)))
        counts = {rule: count for each in held for rule, count in each.num_violations.items()}
        not_judged = {rule: why for each in held for rule, why in each.not_judged.items()}
        together = DecidedAgain(Divergences(), Divergences(), 0)
        for each in decided:
            together = together.continued(each)
        return cls(
            RulesHeld(
                held[0].num_events,
                every_rule,
                {rule: not_judged[rule] for rule in every_rule if rule in not_judged},
                violations[:MAX_VIOLATIONS],
                {rule: counts[rule] for rule in sorted(counts, key=place)},
            ),
            together,
            unfoldable,
        )

    @property
    def judged(self) -> list[str]:
        """The rules that were held against all that was taken."""
        return [rule for rule in self.held.rules if rule not in self.held.not_judged]

    @property
    def is_sound(self) -> bool:
        """No rule is broken and nothing diverges."""
        decided = self.decided
        found = (self.held.num_violations, decided.divergences, decided.reference_differences, self.unfoldable)
        return not any(found)
