"""What came of a re-enactment: the events that the code under test made, audited, and where in the story it made them.

It knows events and rules. It must not know how the events were brought about.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import attrs

from kvledger.lifecycle import Core, LedgerConfiguration, Rule, SequencedEvent
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import RECORDED, Audit, Violation

HOOK_FAILED = "HOOK_FAILED"
"""Stands for a rule: no hook raises."""


UNFOLDABLE = "UNFOLDABLE"
"""Stands for a rule: every event that was written can be folded."""
NEVER_EXCUSED = frozenset({HOOK_FAILED, UNFOLDABLE, Rule.HANDLER_RAISED.value})
"""Whatever happens, this must not."""


def rule_of(violation: Violation) -> str:
    """The rule that was broken, also where the audit passes on what the connector noticed itself."""
    if violation.rule != RECORDED:
        return violation.rule
    return HOOK_FAILED if violation.detail.startswith("hook ") else violation.detail.partition(":")[0]


class Watch:
    """An audit that goes on telling what a log says of itself where it cannot be folded any more.

    A log that broken code wrote may not fold with that code, and neither do its decisions come about again.
    """

    def __init__(self, configuration: LedgerConfiguration, core: Core) -> None:
        self._found: list[Violation] = []
        self.audit = Audit(core, configuration, keeps=self._look_at)

    def take(self, events: Sequence[SequencedEvent]) -> list[Violation]:
        """What is wrong with the events of one call."""
        was_foldable = self.audit.unfoldable is None
        self.audit.take_frame(events)
        new = self.new()
        unfoldable = self.audit.unfoldable
        if unfoldable is None:
            return new
        for sequence, event in events:
            if was_foldable and sequence < unfoldable.sequence:
                continue
            if isinstance(event, e.HookFailed):
                detail = f"hook {event.hook} raised: {event.error}"
                new.append(Violation(RECORDED, sequence, event.request_id, None, detail, ()))
            elif isinstance(event, e.InvariantViolated):
                detail = f"{event.rule}: {event.detail}"
                new.append(Violation(RECORDED, sequence, event.request_id, None, detail, ()))
            elif was_foldable and sequence == unfoldable.sequence:
                request_id = getattr(event, "request_id", "")
                new.append(Violation(UNFOLDABLE, sequence, request_id, None, str(unfoldable), ()))
        return new

    def new(self) -> list[Violation]:
        """What the audit has found since it was last asked."""
        new, self._found = self._found, []
        return new

    def _look_at(self, violation: Violation) -> bool:
        self._found.append(violation)
        return False  # the audit need not keep it, too


@attrs.frozen
class Trouble:
    """A rule that the code under test broke."""

    rule: str
    request_id: str
    detail: str
    hook: str
    recorded_sequence: int
    """Of the observation during whose re-enactment it happened, in the log that was recorded."""

    def __str__(self) -> str:
        of = f" of {self.request_id}" if self.request_id else ""
        return (
            f"{self.rule} was broken{of} in {self.hook}, which re-enacts event {self.recorded_sequence}: {self.detail}"
        )


@attrs.define
class Reenactment:
    """Gathers events call by call. `events` have the sequence numbers of the new log."""

    configuration: LedgerConfiguration
    core: Core = attrs.field(factory=Core.standard)
    """That of the code under test."""
    events: list[SequencedEvent] = attrs.field(factory=list, init=False)
    troubles: list[Trouble] = attrs.field(factory=list, init=False)
    left_out: list[str] = attrs.field(factory=list, init=False)
    """What could not be re-enacted, in words."""
    other_answers: list[str] = attrs.field(factory=list, init=False)
    """Lookups that were answered otherwise than recorded, in words."""
    _watch: Watch = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._watch = Watch(self.configuration, self.core)

    def take(self, events: Iterable[SequencedEvent], hook: str, recorded_sequence: int) -> None:
        """Take up what one call made."""
        made = list(events)
        self.events += made
        self._tell(self._watch.take(made), hook, recorded_sequence)

    def finish(self, hook: str, recorded_sequence: int) -> None:
        """No more calls: decisions that are missing are noticed now."""
        self._watch.audit.finish()
        self._tell(self._watch.new(), hook, recorded_sequence)

    def _tell(self, violations: Iterable[Violation], hook: str, recorded_sequence: int) -> None:
        for violation in violations:
            self.troubles.append(
                Trouble(rule_of(violation), violation.request_id, violation.detail, hook, recorded_sequence)
            )

    def trouble(self, rule: str, *, besides: Collection[str] = ()) -> str:
        """What is wrong, empty where nothing is: a breach of this rule, or one that no story excuses.

        Other rules are not asked for. Where the code decides otherwise than it did then, what vLLM did next was an
        answer to something else, and may well break them.

        Args:
            rule: that the recorded incident broke.
            besides: of what no story excuses, what happened in the recorded log, too.
        """
        never = NEVER_EXCUSED.difference(besides)
        found = [trouble for trouble in self.troubles if trouble.rule == rule or trouble.rule in never]
        if not found:
            return ""
        found.sort(key=lambda trouble: trouble.rule != rule)
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return f"{found[0]}{more}"

    def answers(self, request_id: str) -> list[int | None]:
        """What the lookups of a request were answered, None where they were deferred."""
        return [
            event.num_external_tokens if isinstance(event, e.LookupAnswered) else None
            for _, event in self.events
            if isinstance(event, e.LookupAnswered | e.LookupDeferred) and event.request_id == request_id
        ]
