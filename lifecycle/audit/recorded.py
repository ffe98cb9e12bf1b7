"""RECORDED: what went wrong while it happened, as the connector itself wrote it into the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import Moment


class Recorded:
    """Every `invariant.violated` and `hook.failed` of the log counts as a broken rule.

    Verifies: nothing by itself; the detail begins with the rule that was guarded live, one of which (HANDLER_RAISED)
    no other checker can decide from the log alone.
    Does not verify: whether the live guard was right; that is what deciding again is for.
    """

    rule: ClassVar[str] = "RECORDED"
    looks_at: ClassVar[frozenset[type[e.Event]]] = frozenset({e.InvariantViolated, e.HookFailed})

    def check(self, moment: Moment, _model: Model) -> Iterator[Violation]:
        """Pass it on."""
        event = moment.event
        if isinstance(event, e.InvariantViolated):
            yield violation(self.rule, moment, f"{event.rule}: {event.detail}", event.cause)
        elif isinstance(event, e.HookFailed):
            yield violation(self.rule, moment, f"hook {event.hook} raised: {event.error}")
