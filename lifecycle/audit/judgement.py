"""The findings of an audit, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from kvledger.lifecycle.audit.violations import Violation
from kvledger.lifecycle.divergences import Divergences
from kvledger.lifecycle.events import Event


@attrs.frozen
class Unfoldable:
    """An event that today's code cannot fold or check. Today's code can therefore not have written the log."""

    sequence: int
    event: Event
    error: str

    def __str__(self) -> str:
        return f"event {self.sequence} ({self.event.id}) cannot be folded: {self.error}"


@attrs.frozen
class Judgement:
    """The findings about a log, up to the first event that cannot be folded.

    Rules are in the order in which they are checked.
    """

    num_events: int
    """Number of events on which the rules were checked."""
    rules: Sequence[str]
    not_judged: Mapping[str, str]
    """Rule of an extension → why the rule was not checked, or was checked on a part of the log only."""
    violations: Sequence[Violation]
    """The first violations, at most `MAX_VIOLATIONS`."""
    num_violations: Mapping[str, int]
    """Rule → number of violations."""
    divergences: Divergences
    """Decisions that today's code makes differently from the log."""
    reference_differences: Divergences
    """Events after which the two forms of the transition tables disagree: reference machine and compiled table."""
    num_unjudged: int
    """Number of observations whose decisions the replay skipped, because a missing extension may have taken part in
    them."""
    unfoldable: Unfoldable | None = None

    @property
    def judged(self) -> list[str]:
        """The rules that were checked on all `num_events` events."""
        return [rule for rule in self.rules if rule not in self.not_judged]

    @property
    def is_sound(self) -> bool:
        """Whether no rule is broken, nothing diverges, and every event can be folded."""
        return not any((self.num_violations, self.divergences, self.reference_differences, self.unfoldable))
