"""Recorded: what was noticed live."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.marks import on


class Recorded(Checker):
    """RECORDED: what went wrong while it happened, as the connector itself wrote it into the log.

    Every `invariant.violated` and `hook.failed` of the log counts as a broken rule.

    Verifies: nothing by itself; the detail begins with the rule that was guarded live, one of which (HANDLER_RAISED)
    no other checker can decide from the log alone.
    Does not verify: whether the live guard was right; that is what deciding again is for.
    """

    rule = "RECORDED"

    @on(e.InvariantViolated)
    def _violated(self, event: e.InvariantViolated) -> None:
        self.broken(f"{event.rule}: {event.detail}", event.cause)

    @on(e.HookFailed)
    def _hook_failed(self, event: e.HookFailed) -> None:
        self.broken(f"hook {event.hook} raised: {event.error}")
