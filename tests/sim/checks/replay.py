"""The log alone leads to what the connector believed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvledger.adapters.figures import encoded
from kvledger.adapters.tools.logs.totals import LogTotals
from kvledger.lifecycle import Core, Replay
from kvledger.lifecycle.reader import Model, Reader

if TYPE_CHECKING:
    from sim.logs import LogEnd
    from sim.world import World


def check_replay(world: World) -> None:
    """Every log replays to the live state, by the decisions that were taken, along the reference machine.

    Verifies: each decision made again is the recorded one; the compiled table and the reference machine agree; the
    state at the end equals the live one, and a reader counts the totals that were counted live. Also of an engine that
    was killed, unless events were lost or it had not committed everything.
    Does not verify: whether the decisions were good ones (see `audit.py`), and events behind a gap.
    """
    for log in (*world.dead_logs, world.log):
        _check(log)


def _check(log: LogEnd) -> None:
    replay = Replay(Core.standard(), log.configuration, reference=Core.standard().reference)
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
        model = Model(Core.standard().tables, log.configuration)
        totals = LogTotals(model)
        Reader(model, [totals]).take(log.events)
        assert encoded(totals.state) == log.totals, "a reader counts other totals"
