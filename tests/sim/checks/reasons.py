"""Every missed and every recomputed token has one reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lifecycle_driver.concerned import check_reasons, check_stories

if TYPE_CHECKING:
    from sim.world import World

_STORIES_EVERY = 6
"""Stories are told twice for each request, which takes longer than most worlds live."""


def check_why(world: World) -> None:
    """The reasons of every log add up to its totals.

    Verifies: offered, loaded and recomputed tokens as the projections count them; in some worlds also that each
    request's reasons are the same when they are told from the events that concern it alone.
    Does not verify: that a reason is the right one, and events behind a gap.
    """
    for log in (*world.dead_logs, world.log):
        check = check_reasons if world.seed % _STORIES_EVERY else check_stories
        check(log.events, log.configuration)
