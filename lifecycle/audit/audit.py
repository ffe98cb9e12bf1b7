"""Replay of a log with every checker: the one loop that reads rules, decisions and the reference machine together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from kvledger.lifecycle.audit.checker import Checker, Violation
from kvledger.lifecycle.audit.registry import all_checkers
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.events import VOCABULARY, Event
from kvledger.lifecycle.handlers import HandlerRegistry
from kvledger.lifecycle.machine import ReferenceMachine
from kvledger.lifecycle.replay import Divergence, Replay, ReplayedEvent, SequencedEvent

MAX_VIOLATIONS = 1000
"""Violations that are kept; `Audit.num_violations` counts all."""


@attrs.frozen
class Unfoldable:
    """An event that today's code cannot fold or check: the log is not one that this code could have written."""

    sequence: int
    event: Event
    error: str

    def __str__(self) -> str:
        return f"at sequence {self.sequence} {self.event.id} cannot be folded: {self.error}"


class Audit:
    """Takes the events of one log in order and collects what is wrong with them.

    Without `checkers`, runs all; with `keeps`, counts and collects only the violations that it says True to.
    """

    def __init__(
        self,
        configuration: LedgerConfiguration,
        reference: ReferenceMachine | None = None,
        *,
        checkers: Sequence[Checker] | None = None,
        handlers: HandlerRegistry | None = None,
        keeps: Callable[[Violation], bool] | None = None,
    ) -> None:
        self._keeps = keeps
        self._replay = Replay(configuration, handlers=handlers, reference=reference)
        self.checkers = all_checkers() if checkers is None else tuple(checkers)
        self.violations: list[Violation] = []
        self.num_violations: Counter[str] = Counter()
        """Rule -> how often it was broken."""
        self.num_events = 0
        self.unfoldable: Unfoldable | None = None
        """Set by the first event that cannot be folded; no event after it is taken up."""
        self._checks: dict[type[Event], tuple[Callable[[ReplayedEvent, Projections], Iterator[Violation]], ...]] = {
            event_class: tuple(checker.check for checker in self.checkers if event_class in checker.looks_at)
            for event_class in VOCABULARY.values()
        }

    @property
    def projections(self) -> Projections:
        """What the log folds to so far."""
        return self._replay.projections

    @property
    def divergences(self) -> Sequence[Divergence]:
        """Where today's code decides otherwise than the log."""
        return self._replay.divergences

    @property
    def reference_differences(self) -> Sequence[Divergence]:
        """Where the reference machine goes another way than the compiled table."""
        return self._replay.reference_differences

    @property
    def is_sound(self) -> bool:
        """No rule is broken and nothing diverges."""
        return not (self.num_violations or self.divergences or self.reference_differences or self.unfoldable)

    def take(self, sequence: int, event: Event) -> None:
        """Take up the next event."""
        if self.unfoldable is not None:
            return
        self.num_events += 1
        try:
            step = self._replay.step(sequence, event)
            for check in self._checks[type(event)]:
                for violation in check(step, self._replay.projections):
                    self._keep(violation)
        except Exception as error:  # noqa: BLE001 -- a log that was tampered with must not end its own audit
            self.unfoldable = Unfoldable(sequence, event, f"{type(error).__name__}: {error}")

    def finish(self) -> None:
        """Notice decisions that are missing at the end."""
        if self.unfoldable is None:
            self._replay.finish()

    def run(self, events: Iterable[SequencedEvent]) -> None:
        """Take up all events, then finish."""
        for sequence, event in events:
            self.take(sequence, event)
        self.finish()

    def _keep(self, violation: Violation) -> None:
        if self._keeps is not None and not self._keeps(violation):
            return
        self.num_violations[violation.rule] += 1
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(violation)
