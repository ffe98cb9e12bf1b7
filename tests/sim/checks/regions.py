"""The regions of `table.py` say what the projections say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lifecycle_driver.regions import check_regions as check_log

if TYPE_CHECKING:
    from sim.world import World


def check_regions(world: World) -> None:
    """Walked along each log, no region refuses anything, and none says another thing than the projections.

    Verifies: phase, blocks, first, current and trust of each request, work and source of each job, after each event.
    Does not verify: logs with a gap, which may lack what moves a region.
    """
    for log in (*world.dead_logs, world.log):
        if not log.gaps:
            check_log(log.events, log.configuration)
