"""Worlds whose clients choose request ids that no log can have as they are."""

from __future__ import annotations

import pytest

from sim.checks import CHECKS
from sim.world import World

pytestmark = pytest.mark.scheduler

NUM_WORLDS, NUM_SHORT = 60, 8
FILLER = "\ud800 long " * 70


def odd(name: str) -> str:
    """A long id with lone surrogates; of every third request a plain one."""
    number = int(name.strip("rthei s"))
    return name if number % 3 == 0 else f"{name} {FILLER}{number}"


@pytest.mark.parametrize(
    "seed",
    [
        *range(1_000, 1_000 + NUM_SHORT),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1_000 + NUM_SHORT, 1_000 + NUM_WORLDS)),
    ],
)
def test_a_world_of_odd_request_ids_ends_well(seed: int) -> None:
    """With every fault: vLLM is told each end by its own id, and nothing is remembered of requests that are over."""
    with World(seed, named=odd) as world:
        world.run()
        for check in CHECKS:
            check(world)
        assert len(world.side.ids) == 0
