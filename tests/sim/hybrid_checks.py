"""What must hold after a hybrid world has ended. Wrong KV is caught earlier, in `hashed_model.py`, when it is read.

Verifies: everybody got all tokens, nothing is left of released requests, no rule was broken, the log replays to the
live state without divergence, the reference machine agrees, every audited rule holds, and the reasons add up.
Does not verify: pages at the moment they are copied, and what the faults of `world.py` do; those worlds have one group.
"""

from __future__ import annotations

from lifecycle_driver.concerned import check_reasons, check_stories
from lifecycle_driver.invariants import num_entries
from lifecycle_driver.regions import check_regions as check_log

from kvledger.lifecycle import Core, Replay
from kvledger.lifecycle.audit import Audit
from sim.hybrid_world import HybridWorld


def check_outputs(world: HybridWorld) -> None:
    """Whoever was not aborted got every token it asked for."""
    for request_id, max_tokens in world.max_tokens.items():
        if request_id not in world.aborted:
            num_tokens = len(world.engine.outputs[request_id])
            assert num_tokens == max_tokens, f"{request_id} got {num_tokens} of {max_tokens} tokens"


def check_nothing_left(world: HybridWorld) -> None:
    """Every projection but the chunk index is empty, and every slot belongs to a chunk."""
    projections = world.side.ledger.projections
    left = {name: count for name, count in num_entries(projections).items() if count}
    assert not left, f"entries of released requests: {left}"


def check_rules(world: HybridWorld) -> None:
    """No live rule was broken, no hook failed."""
    figures = world.side.journal.totals.figures
    assert not figures.num_violations, f"{figures.num_violations} rules broken"
    assert not figures.num_hook_failures, f"{figures.num_hook_failures} hooks failed"


def check_replay(world: HybridWorld) -> None:
    """The log alone leads to the state that the connector believed, by the decisions that it took."""
    projections = world.side.ledger.projections
    replay = Replay(Core.standard(), projections.configuration, reference=Core.standard().reference)
    replay.run(world.events())
    assert not replay.divergences, replay.divergences[0]
    assert not replay.reference_differences, replay.reference_differences[0]
    assert replay.projections.snapshot() == projections.snapshot()


def check_regions(world: HybridWorld) -> None:
    """No region refuses anything, and none says another thing than the projections."""
    check_log(world.events(), world.side.ledger.projections.configuration)


def check_audit(world: HybridWorld) -> None:
    """Every checker finds the log sound."""
    audit = Audit(Core.standard(), world.side.ledger.projections.configuration)
    audit.run(world.events())
    assert audit.violations == []
    assert audit.unfoldable is None


def check_why(world: HybridWorld) -> None:
    """Every missed and recomputed token has one reason; in some worlds each request's are told alone, too."""
    check = check_reasons if world.seed % 6 else check_stories
    check(list(world.events()), world.side.ledger.projections.configuration)


HYBRID_CHECKS = (check_outputs, check_nothing_left, check_rules, check_replay, check_regions, check_audit, check_why)
