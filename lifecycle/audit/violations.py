"""Violations that checkers report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import attrs

MAX_VIOLATIONS = 1000
"""Number of violations that are kept; all are counted."""


@attrs.frozen
class Violation:
    """A rule that the log breaks at `sequence`."""

    rule: str
    sequence: int
    request_id: str
    """Empty if the event belongs to no single request."""
    generation: int | None
    """Generation of the event, or else of the request; None if neither is known."""
    detail: str
    evidence: tuple[int, ...]
    """Sequence numbers of earlier events that show the violation."""
    time_ns: int
    ordinal: int | None
    """Ordinal of the life concerned; None if not known, or if no single request is concerned."""
    cause: int
    """Sequence number of the observation at which the rule is broken: the event, or the cause of the decision."""


class Violations:
    """All violations, or those for which `keeps` returns True."""

    def __init__(self, keeps: Callable[[Violation], bool] | None = None) -> None:
        self._keeps = keeps
        self.first: list[Violation] = []
        self.counts: Counter[str] = Counter()
        """Rule → number of violations."""

    def add(self, violation: Violation) -> None:
        """Count a violation, and keep it if it is one of the first `MAX_VIOLATIONS`."""
        if self._keeps is None or self._keeps(violation):
            self.counts[violation.rule] += 1
            if len(self.first) < MAX_VIOLATIONS:
                self.first.append(violation)
