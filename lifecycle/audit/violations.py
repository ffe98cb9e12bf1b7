"""What an audit finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import attrs

MAX_VIOLATIONS = 1000
"""Violations that are kept; all are counted."""


@attrs.frozen
class Violation:
    """A rule that the log breaks at `sequence`."""

    rule: str
    sequence: int
    request_id: str
    """Empty where the event belongs to no single request."""
    generation: int | None
    """The generation the event speaks of, or that the request was in; None where neither is known."""
    detail: str
    evidence: tuple[int, ...]
    """Sequence numbers of earlier events that, with this one, show the breach."""
    time_ns: int
    ordinal: int | None
    """Of the life that the breach concerns; None: not known, or it concerns no single request."""
    cause: int
    """Sequence number of the observation at which the rule is broken: the event itself, or what it was decided upon."""


class Violations:
    """All that checkers find; with `keeps`, only those that it says True to."""

    def __init__(self, keeps: Callable[[Violation], bool] | None = None) -> None:
        self._keeps = keeps
        self.first: list[Violation] = []
        self.counts: Counter[str] = Counter()
        """Rule -> how often it was broken."""

    def add(self, violation: Violation) -> None:
        """One more."""
        if self._keeps is None or self._keeps(violation):
            self.counts[violation.rule] += 1
            if len(self.first) < MAX_VIOLATIONS:
                self.first.append(violation)
