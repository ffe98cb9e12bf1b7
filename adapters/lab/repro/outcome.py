"""The result of a rerun: the events that the code under test wrote, and each breach in them with its recorded call.

This module depends on events and rules, and not on how the events were made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import attrs

from kvledger.adapters.lab.repro.recording import NotRerunnable
from kvledger.adapters.tools.logs.visible import visible
from kvledger.lifecycle import Core, LedgerConfiguration, Rule, SequencedEvent
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import RECORDED, Audit, Violation
from kvledger.lifecycle.codec import CodecError, EventDecoder
from kvledger.storage.events import EventStore

HOOK_FAILED = "HOOK_FAILED"
"""Used like the name of a rule: no hook raises."""
UNFOLDABLE = "UNFOLDABLE"
"""Used like the name of a rule: every written event can be folded."""
NEVER_EXCUSED = frozenset({HOOK_FAILED, UNFOLDABLE, Rule.HANDLER_RAISED.value})
"""Rules whose breach fails a test even if the test is about another rule."""


@attrs.frozen
class Trouble:
    """One breach of a rule, in a log or in the rerun of a log."""

    rule: str
    sequence: int
    """In a log, sequence number of the event that broke the rule.

    In a rerun, sequence number of the recorded observation whose call broke the rule.
    """
    request_id: str
    """Id of the request that the breach concerns; empty if it concerns no single request."""
    detail: str
    hook: str = ""
    """In a rerun, the hook whose call broke the rule; empty for a log."""

    def __str__(self) -> str:
        request = f" for {self.request_id}" if self.request_id else ""
        text = f"{self.rule} was broken{request} in {self.hook}, the call of event {self.sequence}: {self.detail}"
        return visible(text)  # an assertion's message reaches a terminal unchanged


class Watch:
    """An audit of a log. After an event that cannot be folded, it collects only breaches that the log itself records.

    If buggy code wrote a log, it may be impossible to fold the log, or to make the recorded decisions again.
    """

    def __init__(self, configuration: LedgerConfiguration, core: Core) -> None:
        self._found: list[Trouble] = []
        self.audit = Audit(core, configuration, keeps=self._look_at)

    def take(self, events: Sequence[SequencedEvent]) -> list[Trouble]:
        """Audit the events of one call, and return the breaches that were found."""
        was_foldable = self.audit.unfoldable is None
        self.audit.take_frame(events)
        unfoldable = self.audit.unfoldable
        if unfoldable is None:
            return self.new()
        for sequence, event in events:
            if was_foldable and sequence < unfoldable.sequence:
                continue
            if isinstance(event, e.HookFailed):
                detail = f"hook {event.hook} raised: {event.error}"
                self._found.append(Trouble(HOOK_FAILED, sequence, event.request_id, detail))
            elif isinstance(event, e.InvariantViolated):
                self._found.append(Trouble(event.rule, sequence, event.request_id, event.detail))
            elif was_foldable and sequence == unfoldable.sequence:
                request_id = getattr(event, "request_id", "")
                self._found.append(Trouble(UNFOLDABLE, sequence, request_id, str(unfoldable)))
        return self.new()

    def new(self) -> list[Trouble]:
        """Return the breaches that the audit has found since the previous call of this method."""
        new, self._found = self._found, []
        return new

    def _look_at(self, violation: Violation) -> bool:
        rule = violation.rule
        if rule == RECORDED:  # the connector noticed it itself
            rule = HOOK_FAILED if violation.detail.startswith("hook ") else violation.detail.partition(":")[0]
        self._found.append(Trouble(rule, violation.sequence, violation.request_id, violation.detail))
        return False  # the audit need not keep it as well


RECENT_BYTES = 1 << 22
"""Bytes of the log that a rerun writes. Events are read after every call, so older ones may be dropped."""


class Written:
    """Reads and decodes the new events of a log, as any reader of the log does."""

    def __init__(self, store: EventStore, decoder: EventDecoder) -> None:
        self._store = store
        self._decoder = decoder
        self._next_sequence = 1

    def take(self) -> list[SequencedEvent]:
        """Return the events that were written since the previous call of this method.

        Raises:
            NotRerunnable: because of the recorded calls, the code under test wrote an event that no log can contain.
        """
        try:
            events = [
                (sequence, event)
                for frame in self._store.read(self._next_sequence)
                for sequence, event in enumerate(self._decoder.decode(frame.payload), frame.first_sequence)
                if sequence >= self._next_sequence
            ]
        except CodecError as error:
            raise NotRerunnable(f"the recorded calls lead to an event that a log cannot contain: {error}") from error
        if events:
            self._next_sequence = events[-1][0] + 1
        return events


@attrs.define
class Rerun:
    """Collects and audits the events of a rerun, call by call. `events` have sequence numbers of the rerun's log."""

    configuration: LedgerConfiguration
    core: Core = attrs.field(factory=Core.standard)
    """The core of the code under test."""
    events: list[SequencedEvent] = attrs.field(factory=list, init=False)
    troubles: list[Trouble] = attrs.field(factory=list, init=False)
    left_out: list[str] = attrs.field(factory=list, init=False)
    """Recorded events whose calls could not be made again, as text."""
    other_answers: list[str] = attrs.field(factory=list, init=False)
    """Lookups that were answered differently than recorded, as text."""
    _watch: Watch = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._watch = Watch(self.configuration, self.core)

    def take(self, events: Iterable[SequencedEvent], hook: str, recorded_sequence: int) -> None:
        """Add and audit the events of one call."""
        made = list(events)
        self.events += made
        self._add(self._watch.take(made), hook, recorded_sequence)

    def finish(self, hook: str, recorded_sequence: int) -> None:
        """End the audit. At its end, the audit also finds decisions that are missing."""
        self._watch.audit.finish()
        self._add(self._watch.new(), hook, recorded_sequence)

    def _add(self, troubles: Iterable[Trouble], hook: str, recorded_sequence: int) -> None:
        self.troubles += [attrs.evolve(trouble, hook=hook, sequence=recorded_sequence) for trouble in troubles]

    def trouble(self, rule: str, *, besides: Collection[str] = ()) -> str:
        """Return in words the breach of `rule` or of a rule in `NEVER_EXCUSED`; empty if there is none.

        Breaches of other rules are ignored. If the code now makes other decisions, the rest of the recording does not
        fit these decisions. This mismatch alone can break other rules.

        Args:
            rule: the rule that the incident broke.
            besides: rules of `NEVER_EXCUSED` to ignore, because the recorded log broke them, too.
        """
        never = NEVER_EXCUSED.difference(besides)
        found = [trouble for trouble in self.troubles if trouble.rule == rule or trouble.rule in never]
        if not found:
            return ""
        found.sort(key=lambda trouble: trouble.rule != rule)
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return f"{found[0]}{more}"
