"""Replay of a log with every checker: the one loop that reads rules, decisions and the reference machine together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import attrs

from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.of_extensions import RuleOfExtension
from kvledger.lifecycle.audit.taken_over import taken_over
from kvledger.lifecycle.audit.violations import Violation, Violations
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.events import Event
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.replay import Around, Replay, SequencedEvent, batches

_MakeChecker = Callable[[Model], Checker]
_EVENTS_PER_BATCH = 256


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

    Without `checkers`, runs those of all rules of the core; with `keeps`, counts and collects only the violations that
    it says True to; with `start`, the state before the first event, the log may begin in its middle.
    """

    def __init__(
        self,
        core: Core,
        configuration: LedgerConfiguration,
        *,
        checkers: Iterable[_MakeChecker] | None = None,
        keeps: Callable[[Violation], bool] | None = None,
        start: Projections | None = None,
    ) -> None:
        found = Violations(keeps)
        self.violations = found.first
        self.num_violations = found.counts
        """Rule -> how often it was broken."""
        model = Model.of(core.compiled, core.gating, core.events.values(), configuration, found)
        self.checkers = tuple(make(model) for make in (_checkers(core) if checkers is None else checkers))
        checks = [*model.folds(), *(check for checker in self.checkers for check in checker.checks())]
        of_events = [(kind, check) for kind, check in checks if issubclass(kind, Event)]
        self._replay = Replay(
            core, configuration, reference=core.reference, checks=of_events, current=model.moment, start=start
        )
        self.projections = self._replay.projections
        """What the log folds to so far."""
        self.divergences = self._replay.divergences
        """Where today's code decides otherwise than the log."""
        self.reference_differences = self._replay.reference_differences
        """Where the reference machine goes another way than the compiled table."""
        if start is not None:
            known = taken_over(start)
            model.begin(known)
            for checker in self.checkers:
                checker.begin(known)
        self.unfoldable: Unfoldable | None = None
        """Set by the first event that cannot be folded; no event after it is taken."""

    @property
    def num_events(self) -> int:
        """Events taken."""
        return self._replay.num_events

    @property
    def num_unjudged(self) -> int:
        """Observations upon which an extension may have decided whose code is not here."""
        return self._replay.num_unjudged

    @property
    def last_sequence(self) -> int:
        """The sequence number of the last event that was taken, 0 before the first."""
        return self._replay.current.sequence

    @property
    def not_judged(self) -> dict[str, str]:
        """Rule of an extension -> why it could not be held against the log, or not against all of it."""
        of_extensions = (checker for checker in self.checkers if isinstance(checker, RuleOfExtension))
        return {checker.rule: checker.not_judged for checker in of_extensions if checker.not_judged}

    @property
    def judged(self) -> list[str]:
        """The rules that were held against all that was taken."""
        return [checker.rule for checker in self.checkers if checker.rule not in self.not_judged]

    @property
    def is_sound(self) -> bool:
        """No rule is broken and nothing diverges."""
        return not (self.num_violations or self.divergences or self.reference_differences or self.unfoldable)

    def finish(self) -> None:
        """Notice decisions that are missing at the end."""
        if self.unfoldable is None:
            self._replay.finish()

    def run(self, events: Iterable[SequencedEvent]) -> None:
        """Take up all events, then finish."""
        # In batches, so that what fails while events are read is not taken for an event that cannot be folded.
        self.run_frames(batches(events, _EVENTS_PER_BATCH))

    def run_frames(self, frames: Iterable[Iterable[SequencedEvent]], *, at: int | None = None) -> None:
        """Take up all events of all frames, or those up to sequence number `at`, then finish.

        Without `at`, all of `frames` is read, also behind an event that cannot be folded.
        """
        for frame in frames:
            events = list(frame)
            if at is not None and events and events[-1][0] > at:
                # A decision that the next event would show to be missing is still part of the moment asked for.
                self.take_frame([(sequence, event) for sequence, event in events if sequence <= at])
                return
            self.take_frame(events)
        self.finish()

    def take_frame(self, events: Iterable[SequencedEvent], around: Around | None = None) -> None:
        """Take up the next events, observations with all of their decisions; reading them must not fail.

        See `Replay.take` for `around`.
        """
        if self.unfoldable is None:
            try:
                self._replay.take(events, around)
            except OSError:  # of `around`: its file cannot be written
                raise
            except Exception as error:
                current = self._replay.current
                if current.event is None:  # nothing was taken: the events are not such
                    raise
                # A log that was tampered with must not end its own audit.
                self.unfoldable = Unfoldable(current.sequence, current.event, f"{type(error).__name__}: {error}")


def _checkers(core: Core) -> Iterator[_MakeChecker]:
    extension_of = {rule: extension for extension in core.extensions for rule in extension.rules}
    for rule, make in core.rules.items():
        its = extension_of.get(rule)
        yield make if its is None else partial(RuleOfExtension, rule, its.name, its.payload_of, make)
