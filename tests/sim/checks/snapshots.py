"""A log that is begun in its middle, from a snapshot, verifies as the whole one does."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from kvledger.adapters.figures import Totals
from kvledger.lifecycle import Core
from kvledger.lifecycle.audit import Audit, StartFolds
from sim.checks.audit import rule_of
from sim.checks.rules import allowed_rules

if TYPE_CHECKING:
    from sim.logs import LogEnd
    from sim.world import World

_NUM_CUTS = 2


def check_snapshots(world: World) -> None:
    """Every log is cut at some places, and folded, decided again and audited from the state there.

    Verifies: what was in flight at the cut raises no alarm; the decisions behind it are the recorded ones; the state at
    the end is that of the whole log, and so are the totals.
    Does not verify: files of snapshots (see tests/storage/events/test_snapshots.py).
    """
    chance = Random(f"snapshots {world.seed}")
    for log in (*world.dead_logs, world.log):
        _check(log, allowed_rules(world), chance)


def _check(log: LogEnd, allowed: frozenset[str], chance: Random) -> None:
    places = [n for n in range(1, len(log.events)) if not log.events[n][1].is_decision]
    cuts = sorted(chance.sample(places, min(_NUM_CUTS, len(places))))
    whole = StartFolds(Core.standard(), log.configuration)
    totals = Totals(whole.projections)
    begun: list[tuple[int, Audit, Totals]] = []
    for number, (sequence, event) in enumerate(log.events):
        if number in cuts:
            audit = Audit(Core.standard(), log.configuration, start=whole.start())
            continued = Totals.continued(audit.projections, totals.stored())
            audit.take_frame(log.events[number:])
            begun.append((sequence, audit, continued))
        whole.take([(sequence, event)])
    expected = whole.projections.snapshot()
    for cut, audit, continued in begun:
        if not log.gaps:
            audit.finish()
        assert audit.unfoldable is None, f"the log cannot be folded from {cut}: {audit.unfoldable}"
        assert not audit.divergences, f"the replay from {cut} diverges: {audit.divergences[0]}"
        found = [violation for violation in audit.violations if rule_of(violation) not in allowed]
        assert not found, f"the audit from {cut} says: {found[0]}"
        assert audit.projections.snapshot() == expected, f"the replay from {cut} leads to another state"
        assert continued.stored() == totals.stored(), f"the replay from {cut} counts other totals"
