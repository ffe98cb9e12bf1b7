"""Some hundred worlds on vLLM's real scheduler; `make sim SEEDS=10000` runs more of them."""

from __future__ import annotations

import pytest

from sim.checks import CHECKS
from sim.world import World

pytestmark = pytest.mark.scheduler

NUM_WORLDS = 120


@pytest.mark.parametrize("seed", range(NUM_WORLDS))
def test_a_world_ends_well(seed: int) -> None:
    """Preemptions, aborts, resets and failed copies: right KV, all tokens, a log that replays."""
    print(f"reproduce with: make sim SEED={seed}")
    world = World(seed)
    world.run()
    for check in CHECKS:
        check(world)


def test_the_worlds_meet_what_they_are_for() -> None:
    """A simulation in which nothing was preempted or recovered would prove nothing."""
    worlds = [World(seed) for seed in range(12)]
    for world in worlds:
        world.run()
    figures = [world.side.ledger.projections.totals.figures for world in worlds]
    assert sum(figure.num_preemptions for figure in figures) > 20
    assert sum(figure.num_tokens_recovered for figure in figures) > 100
    assert sum(figure.num_chunks_evicted for figure in figures) > 20
    assert sum(figure.num_loads_failed for figure in figures) > 0
