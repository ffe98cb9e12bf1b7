"""Recorded: violations and failures that the connector itself noticed."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.marks import on


class Recorded(Checker):
    """RECORDED: the connector noticed no violation, and no hook failed.

    Each `invariant.violated` and each `hook.failed` counts as a violation of this rule.

    Verifies: nothing by itself. The detail of a violation begins with the rule that the connector found broken, or
    names the hook that failed. Only this rule reports HANDLER_RAISED, because nothing else in a log shows that a state
    handler raised.
    Does not verify: whether the connector recorded the violation rightly. `kvledger verify` shows that when it makes
    the decisions again.
    """

    rule = "RECORDED"

    @on(e.InvariantViolated)
    def _violated(self, event: e.InvariantViolated) -> None:
        self.broken(f"{event.rule}: {event.detail}", event.cause)

    @on(e.HookFailed)
    def _hook_failed(self, event: e.HookFailed) -> None:
        self.broken(f"hook {event.hook} raised: {event.error}")
