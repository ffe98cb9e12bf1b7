"""The audit finds nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvledger.lifecycle import Core
from kvledger.lifecycle.audit import Audit, Violation
from kvledger.lifecycle.audit.rules.jobs import CompletionOnce
from kvledger.lifecycle.audit.rules.recorded import Recorded
from sim.checks.rules import allowed_rules

if TYPE_CHECKING:
    from sim.logs import LogEnd
    from sim.world import World


def check_audit(world: World) -> None:
    """Every checker of `kvledger.lifecycle.audit` goes over every log.

    Verifies: all rules that a log can decide, but those that a fault of this world breaks.
    Does not verify: rules of `Core.not_checked`, and events behind a gap.
    """
    for log in (*world.dead_logs, world.log):
        _check(log, allowed_rules(world))


def _check(log: LogEnd, allowed: frozenset[str]) -> None:
    audit = Audit(Core.standard(), log.configuration)
    audit.take_frame(log.events)
    if not log.gaps:
        audit.finish()
    assert audit.unfoldable is None, f"the log cannot be folded: {audit.unfoldable}"
    found = [violation for violation in audit.violations if not _is_caused_by_a_fault(violation, allowed)]
    assert not found, f"the audit says: {found[0]}"


def _is_caused_by_a_fault(violation: Violation, allowed: frozenset[str]) -> bool:
    # Faults speak twice and fall silent. A report too many breaks its rule; silence breaks none, as long as it is
    # noticed and recorded.
    return rule_of(violation) in allowed and violation.rule in {Recorded.rule, CompletionOnce.rule}


def rule_of(violation: Violation) -> str:
    """The rule that was broken, also where the audit only repeats what the connector had noticed itself."""
    return violation.detail.partition(":")[0] if violation.rule == Recorded.rule else violation.rule
