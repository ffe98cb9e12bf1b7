"""The connector broke no rule of its own."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvledger.lifecycle import events as e

if TYPE_CHECKING:
    from sim.world import World


def allowed_rules(world: World) -> frozenset[str]:
    """Rules that a fault of this world breaks; the connector is right to say so."""
    return frozenset().union(*(fault.breaks for fault in world.faults))


def check_rules(world: World) -> None:
    """No live rule was broken but by a fault that is meant to break it, no hook failed.

    Verifies: what the connector itself noticed, in the present engine and in the logs of those that were killed.
    Does not verify: rules that only an audit can decide (see `audit.py`).
    """
    for log in (*world.dead_logs, world.log):
        broken = Counter(event.rule for _, event in log.events if isinstance(event, e.InvariantViolated))
        unexpected = {rule: count for rule, count in broken.items() if rule not in allowed_rules(world)}
        assert not unexpected, f"rules broken without a fault that breaks them: {unexpected}"
    figures = world.side.journal.totals.figures
    assert not figures.num_hook_failures, f"{figures.num_hook_failures} hooks failed"
    assert allowed_rules(world) or not figures.num_violations, f"{figures.num_violations} rules broken"
    assert not world.side.journal.is_disabled, "the ledger was disabled"
