"""Worlds with sliding windows on vLLM's real scheduler: wrong KV is seen by the model the moment it is read."""

from __future__ import annotations

import pytest

from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT
from sim.hybrid_checks import HYBRID_CHECKS
from sim.hybrid_world import HybridWorld

pytestmark = pytest.mark.scheduler

NUM_WORLDS = 60
NUM_SHORT = 8


def live(seed: int) -> HybridWorld:
    """Live through a world and check what must hold after every one."""
    print(f"seed {seed}")
    world = HybridWorld(seed)
    world.run()
    for check in HYBRID_CHECKS:
        check(world)
    return world


@pytest.mark.long
@pytest.mark.parametrize("seed", range(NUM_SHORT, NUM_WORLDS))
def test_a_hybrid_world_ends_well(seed: int) -> None:
    """Preemptions, aborts, resets and failed copies: right KV in every group, all tokens, a log that replays."""
    live(seed)


def test_the_hybrid_worlds_meet_what_they_are_for() -> None:
    """Loads that leave out what a window does not see, requests that recover, loads that fail."""
    worlds = [live(seed) for seed in range(NUM_SHORT)]
    figures = [world.side.journal.totals.figures for world in worlds]
    assert sum(figure.num_preemptions for figure in figures) > 20
    assert sum(figure.num_tokens_recovered for figure in figures) > 100
    assert sum(figure.num_loads_failed for figure in figures) > 0
    loads = [event for world in worlds for _, event in world.events() if isinstance(event, e.LoadIssued)]
    assert any(NO_SLOT in load.slots for load in loads)
