"""Recorded: what the connector itself noticed."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.marks import on


class Recorded(Checker):
    """RECORDED: the connector noticed no violation, and no hook failed.

    Each `invariant.violated` and each `hook.failed` counts as a violation of this rule.

    Verifies: nothing itself. The detail begins with the rule that the connector checked, or names the hook. No other
    checker can decide one of those rules, HANDLER_RAISED, from the log alone.
    Does not verify: whether the connector was right. `kvledger verify` finds that out when it makes the decisions
    again.
    """

    rule = "RECORDED"

    @on(e.InvariantViolated)
    def _violated(self, event: e.InvariantViolated) -> None:
        self.broken(f"{event.rule}: {event.detail}", event.cause)

    @on(e.HookFailed)
    def _hook_failed(self, event: e.HookFailed) -> None:
        self.broken(f"hook {event.hook} raised: {event.error}")
