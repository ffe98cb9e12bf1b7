"""What came of a rerun: the events that the code under test made, audited, and during which recorded calls.

It knows events and rules. It must not know how the events were brought about.
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
"""Stands for a rule: no hook raises."""
UNFOLDABLE = "UNFOLDABLE"
"""Stands for a rule: every event that was written can be folded."""
NEVER_EXCUSED = frozenset({HOOK_FAILED, UNFOLDABLE, Rule.HANDLER_RAISED.value})
"""Whatever happens, this must not."""


@attrs.frozen
class Trouble:
    """A rule that was broken: in a log, or by the code under test in a rerun of one."""

    rule: str
    sequence: int
    """Of the event in the log; in a rerun, of the recorded observation during whose call it happened."""
    request_id: str
    """Empty where it belongs to no single request."""
    detail: str
    hook: str = ""
    """In a rerun, the call."""

    def __str__(self) -> str:
        of = f" of {self.request_id}" if self.request_id else ""
        text = f"{self.rule} was broken{of} in {self.hook}, which makes event {self.sequence} again: {self.detail}"
        return visible(text)  # an assertion's message reaches a terminal as it is


class Watch:
    """An audit that goes on where a log cannot be folded any more, by what the log says of itself.

    A log that broken code wrote may not fold with that code, and neither do its decisions come about again.
    """

    def __init__(self, configuration: LedgerConfiguration, core: Core) -> None:
        self._found: list[Trouble] = []
        self.audit = Audit(core, configuration, keeps=self._look_at)

    def take(self, events: Sequence[SequencedEvent]) -> list[Trouble]:
        """What is wrong with the events of one call."""
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
        """What the audit has found since it was last asked."""
        new, self._found = self._found, []
        return new

    def _look_at(self, violation: Violation) -> bool:
        rule = violation.rule
        if rule == RECORDED:  # the connector noticed it itself
            rule = HOOK_FAILED if violation.detail.startswith("hook ") else violation.detail.partition(":")[0]
        self._found.append(Trouble(rule, violation.sequence, violation.request_id, violation.detail))
        return False  # the audit need not keep it, too


RECENT_BYTES = 1 << 22
"""Of the log that a rerun writes: events are read after every call, and what was read may be forgotten."""


class Written:
    """The events that a log gets, as its reader sees them."""

    def __init__(self, store: EventStore, decoder: EventDecoder) -> None:
        self._store = store
        self._decoder = decoder
        self._next_sequence = 1

    def take(self) -> list[SequencedEvent]:
        """Those since the last call.

        Raises:
            NotRerunnable: the recorded calls, or some of them, make the code under test write what no log may hold.
        """
        try:
            events = [
                (sequence, event)
                for frame in self._store.read(self._next_sequence)
                for sequence, event in enumerate(self._decoder.decode(frame.payload), frame.first_sequence)
                if sequence >= self._next_sequence
            ]
        except CodecError as error:
            raise NotRerunnable(f"its calls lead to an event that no log may hold: {error}") from error
        if events:
            self._next_sequence = events[-1][0] + 1
        return events


@attrs.define
class Rerun:
    """Gathers events call by call. `events` have the sequence numbers of the new log."""

    configuration: LedgerConfiguration
    core: Core = attrs.field(factory=Core.standard)
    """That of the code under test."""
    events: list[SequencedEvent] = attrs.field(factory=list, init=False)
    troubles: list[Trouble] = attrs.field(factory=list, init=False)
    left_out: list[str] = attrs.field(factory=list, init=False)
    """What could not be run again, in words."""
    other_answers: list[str] = attrs.field(factory=list, init=False)
    """Lookups that were answered otherwise than recorded, in words."""
    _watch: Watch = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._watch = Watch(self.configuration, self.core)

    def take(self, events: Iterable[SequencedEvent], hook: str, recorded_sequence: int) -> None:
        """Fold what one call made."""
        made = list(events)
        self.events += made
        self._add(self._watch.take(made), hook, recorded_sequence)

    def finish(self, hook: str, recorded_sequence: int) -> None:
        """No more calls: decisions that are missing are noticed now."""
        self._watch.audit.finish()
        self._add(self._watch.new(), hook, recorded_sequence)

    def _add(self, troubles: Iterable[Trouble], hook: str, recorded_sequence: int) -> None:
        self.troubles += [attrs.evolve(trouble, hook=hook, sequence=recorded_sequence) for trouble in troubles]

    def trouble(self, rule: str, *, besides: Collection[str] = ()) -> str:
        """What is wrong, empty where nothing is: a breach of this rule, or one that nothing excuses.

        Other rules are not asked for. Where the code decides otherwise than it did then, what vLLM did next was an
        answer to something else, and may well break them.

        Args:
            rule: that the recorded incident broke.
            besides: of what nothing excuses, what happened in the recorded log, too.
        """
        never = NEVER_EXCUSED.difference(besides)
        found = [trouble for trouble in self.troubles if trouble.rule == rule or trouble.rule in never]
        if not found:
            return ""
        found.sort(key=lambda trouble: trouble.rule != rule)
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return f"{found[0]}{more}"
