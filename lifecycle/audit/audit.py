"""Both halves of an audit: the rules, and a replay that makes every decision again. Neither half uses the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from kvledger.lifecycle.audit.judgement import Judgement, Unfoldable
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.audit.of_extensions import RuleOfExtension
from kvledger.lifecycle.audit.rule_checks import MakeChecker, RuleChecks
from kvledger.lifecycle.audit.start import Start
from kvledger.lifecycle.audit.violations import Violation, Violations
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.reader.moment import Moment
from kvledger.lifecycle.replay import Replay, ReplayedEvent, SequencedEvent, batches

_EVENTS_PER_BATCH = 256


class Audit:
    """Audits the events of one log, in order.

    Args:
        core: the core for this log.
        configuration: the configuration in the log's header.
        checkers: functions that make the checkers; default: the checkers of all rules of the core.
        keeps: violation → whether it counts; default: every violation counts.
        start: the state before the first event, if the audit begins in the middle of a log.

    Raises:
        SnapshotError: `start.state` cannot be used.
        NotResumable: `start.reader` cannot be used.
    """

    def __init__(
        self,
        core: Core,
        configuration: LedgerConfiguration,
        *,
        checkers: Iterable[MakeChecker] | None = None,
        keeps: Callable[[Violation], bool] | None = None,
        start: Start | None = None,
    ) -> None:
        model = AuditModel(core.tables, configuration, Violations(keeps))
        if start is not None:
            start.resume(model, core)
        makers = _checkers_of(core) if checkers is None else checkers
        self._rules = RuleChecks(model, makers, begins_late=start is not None)
        projections = None if start is None else start.projections(core, configuration)
        self._replay = Replay(core, configuration, reference=core.reference, start=projections)
        self.checkers = self._rules.checkers
        self.violations = self._rules.violations.first
        self.num_violations = self._rules.violations.counts
        """Rule → number of violations."""
        self.projections = self._replay.projections
        """State that the replay has computed so far."""
        self.divergences = self._replay.divergences
        self.reference_differences = self._replay.reference_differences
        self.unfoldable: Unfoldable | None = None
        """The first event that cannot be folded. The audit ignores all events after it."""

    @property
    def num_events(self) -> int:
        """Number of events taken."""
        return self._replay.num_events

    @property
    def last_sequence(self) -> int:
        """Sequence number of the last event taken; 0 if no event was taken."""
        return self._replay.current.sequence

    @property
    def is_sound(self) -> bool:
        """Whether no rule is broken, nothing diverges, and every event can be folded."""
        return self.judgement().is_sound

    def judgement(self) -> Judgement:
        """Return the findings so far."""
        rules = [checker.rule for checker in self.checkers]
        of_extensions = (checker for checker in self.checkers if isinstance(checker, RuleOfExtension))
        return Judgement(
            self._rules.num_events,
            rules,
            {checker.rule: checker.not_judged for checker in of_extensions if checker.not_judged},
            self.violations,
            {rule: self.num_violations[rule] for rule in rules if rule in self.num_violations},
            self.divergences,
            self.reference_differences,
            self._replay.num_unjudged,
            self.unfoldable,
        )

    def finish(self) -> None:
        """Report decisions that are missing at the end of the log."""
        if self.unfoldable is None:
            self._replay.finish()

    def run(self, events: Iterable[SequencedEvent]) -> None:
        """Audit all events, then call `finish`."""
        # Read in batches, so that an error while reading is not reported as an event that cannot be folded.
        self.run_frames(batches(events, _EVENTS_PER_BATCH))

    def run_frames(self, frames: Iterable[Iterable[SequencedEvent]], *, at: int | None = None) -> None:
        """Audit the events of all frames, or only the events up to sequence number `at`.

        If `frames` has an event after `at`, reading stops there and `finish` is not called. Otherwise `frames` is read
        to the end, even after an event that cannot be folded, and then `finish` is called.
        """
        for frame in frames:
            events = list(frame)
            if at is not None and events and events[-1][0] > at:
                # Do not finish: the log goes on, so a decision that is not recorded by `at` is not missing.
                self.take_frame([(sequence, event) for sequence, event in events if sequence <= at])
                return
            self.take_frame(events)
        self.finish()

    def take_frame(self, events: Iterable[SequencedEvent]) -> None:
        """Audit the next events. After each observation, `events` must contain all decisions that it caused.

        Iterating over `events` must not raise.
        """
        if self.unfoldable is not None:
            return
        events = list(events)
        unfoldable = _take(self._replay.current, self._replay.take, events)
        if unfoldable is not None:
            events = [numbered for numbered in events if numbered[0] < unfoldable.sequence]
        self.unfoldable = _take(self._rules.moment, self._rules.take, events) or unfoldable


def _take(
    at: ReplayedEvent | Moment, take: Callable[[Iterable[SequencedEvent]], None], events: Iterable[SequencedEvent]
) -> Unfoldable | None:
    try:
        take(events)
    except Exception as error:
        if at.event is None:  # the input does not consist of events
            raise
        # A manipulated log must not crash the audit.
        return Unfoldable(at.sequence, at.event, f"{type(error).__name__}: {error}")
    return None


def _checkers_of(core: Core) -> Iterator[MakeChecker]:
    """Yield, for each rule of the core, the function that makes its checker, in the order of `core.rules`."""
    extension_of = {rule: extension for extension in core.extensions for rule in extension.rules}
    for rule, make in core.rules.items():
        its = extension_of.get(rule)
        yield make if its is None else partial(RuleOfExtension, rule, its.name, its.payload_of, make)
