"""Violations that checkers report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import attrs

MAX_VIOLATIONS = 1000
"""Number of violations that are kept. Further violations are only counted."""


@attrs.frozen
class Violation:
    """One breach of a rule, at event `sequence` of the log."""

    rule: str
    sequence: int
    request_id: str
    """Empty if the violation concerns no single request."""
    generation: int | None
    """Generation that the event names, else the present generation of the request; None if neither is known."""
    detail: str
    evidence: tuple[int, ...]
    """Sequence numbers of earlier events that show the violation."""
    time_ns: int
    ordinal: int | None
    """Ordinal of the life concerned; None if not known, or if no single request is concerned."""
    cause: int
    """Sequence number of the observation that breaks the rule. If a decision breaks the rule, sequence number of the
    observation that caused the decision."""


class Violations:
    """Collects violations: all of them, or those for which `keeps` returns True."""

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
