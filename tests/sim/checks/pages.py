"""Every page that was copied was the right one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.world import World


def check_pages(world: World) -> None:
    """No copy moved KV of other tokens than those it was made for, and every copy was a job.

    Verifies: before a save the source blocks, after it the slots, after a load the blocks, in every layer, for every
    position that counts; also of saves that nobody ever loads. `World.step` asks after each step already.
    Does not verify: positions of a page behind the last token that counts, which hold anything.
    """
    world.pages.raise_if_wrong()
