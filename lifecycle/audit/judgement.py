"""What an audit found in a log, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from kvledger.lifecycle.audit.violations import Violation
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
class Judgement:
    """Of a log, up to the event that cannot be folded. The rules stand in the order in which they look at an event."""

    num_events: int
    """That the rules were held against."""
    rules: Sequence[str]
    not_judged: Mapping[str, str]
    """Rule of an extension → why it could not be held against the log, or not against all of it."""
    violations: Sequence[Violation]
    """The first ones."""
    num_violations: Mapping[str, int]
    """Rule → how often it was broken."""
    divergences: Divergences
    """Where today's code decides otherwise than the log says."""
    reference_differences: Divergences
    """Where the reference machine goes another way than the compiled table."""
    num_unjudged: int
    """Observations upon which an extension may have decided whose code is not here."""
    unfoldable: Unfoldable | None = None

    @property
    def judged(self) -> list[str]:
        """The rules that were held against all that was taken."""
        return [rule for rule in self.rules if rule not in self.not_judged]

    @property
    def is_sound(self) -> bool:
        """No rule is broken and nothing diverges."""
        return not any((self.num_violations, self.divergences, self.reference_differences, self.unfoldable))
