"""What was committed is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.faults.disk import FullDisk, StallingDisk

if TYPE_CHECKING:
    from sim.logs import LogEnd
    from sim.world import World


def check_logs(world: World) -> None:
    """Everything committed can be read back, and what a full disk cost stands in the log as a gap.

    Verifies: of every engine's log, in memory or in files, also of one that was killed: it is undamaged, gapless
    but for gaps that it tells, and the gaps add up to the events that the backlog says it lost. Where the engine is
    alive and the disk works again, nothing waits.
    Does not verify: bytes on a disk after the machine itself failed (see tests/storage/events).
    """
    for log in world.dead_logs:
        _check_stored(log)
        # A killed writer's last frame may be torn, where the disk kept it from taking it back.
        may_be_torn = {StallingDisk.name, FullDisk.name} & set(world.fault_names)
        allowed = {"torn_tail"} if may_be_torn else set()
        assert set(log.damage) <= allowed, f"the log of a killed engine is damaged: {log.damage}"
    _check_stored(world.log)
    assert not world.log.damage, f"the log is damaged: {world.log.damage}"
    assert not world.log.num_events_backlogged, f"{world.log.num_events_backlogged} events wait for a disk that works"
    num_in_gaps = sum(num_events for _, num_events in world.log.gaps)
    assert num_in_gaps == world.log.num_events_lost, f"gaps of {num_in_gaps}, {world.log.num_events_lost} events lost"
    assert not world.log.num_events_lost or FullDisk.name in world.fault_names, "events lost without a full disk"


def _check_stored(log: LogEnd) -> None:
    missing = log.next_committed_sequence - log.next_stored_sequence
    waiting = log.num_events_backlogged
    told = waiting + log.num_events_lost - sum(num_events for _, num_events in log.gaps)
    assert missing == told, f"{missing} committed events are not stored, {told} are known to wait or to be lost"
    sequences = [sequence for sequence, _ in log.events]
    assert sequences == list(range(1, len(sequences) + 1)), "sequence numbers have a hole"
