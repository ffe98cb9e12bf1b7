"""The log alone leads to what the connector believed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvledger.adapters.totals import Totals
from kvledger.lifecycle import Core, Replay

if TYPE_CHECKING:
    from sim.logs import LogEnd
    from sim.world import World


def check_replay(world: World) -> None:
    """Every log replays to the live state, by the decisions that were taken, along the reference machine.

    Verifies: each decision made again is the recorded one; the compiled table and the reference machine agree; the
    state at the end equals the live one, and so do the totals, also of an engine that was killed, unless events were
    lost or it had not committed everything.
    Does not verify: whether the decisions were good ones (see `audit.py`), and events behind a gap.
    """
    for log in (*world.dead_logs, world.log):
        _check(log)


def _check(log: LogEnd) -> None:
    replay = Replay(Core.standard(), log.configuration, reference=Core.standard().reference)
    totals = Totals(replay.projections)
    replay.take(log.events)
    if not log.gaps:
        replay.finish()
    assert not replay.divergences, f"replay diverges: {replay.divergences[0]}"
    assert not replay.reference_differences, f"the reference machine differs: {replay.reference_differences[0]}"
    is_complete = not log.gaps and log.next_stored_sequence == log.next_committed_sequence
    if is_complete and log.snapshot is not None:
        replayed = replay.projections.snapshot()
        different = [name for name in replayed if replayed[name] != log.snapshot[name]]
        assert not different, f"replay leads to another state of {different}"
        assert totals.stored() == log.totals, "replay counts other totals"
