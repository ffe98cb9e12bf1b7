"""Worlds whose clients choose request ids that no log can have as they are."""

from __future__ import annotations

import pytest

from kvledger.lifecycle import cut_request_id, logged_request_id
from sim.checks import CHECKS
from sim.world import World

pytestmark = pytest.mark.scheduler

NUM_WORLDS, NUM_SHORT = 60, 8
STUCK = (2_002, 2_017, 2_027)
"""Worlds in which an end was lost while two requests had one id in the log."""
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


def forged(name: str) -> str:
    """Of four requests in a row a long id, the id that the log has for it, and those that the log has instead."""
    family, place = divmod(int(name.strip("rthei s")), 4)
    long = f"{family} {FILLER}"
    cut = logged_request_id(long)
    instead = cut_request_id(cut + long)
    ids = [long, cut, instead, cut_request_id(instead + long)]
    first = family % 3  # each of them comes first in some family
    return [*ids[first:], *ids[:first]][place]


@pytest.mark.parametrize(
    "seed", [*STUCK, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3_000, 3_000 + NUM_WORLDS))]
)
def test_a_world_of_forged_request_ids_ends_well(seed: int) -> None:
    """A client sends the ids that the log has for other requests, while these live and after their end."""
    with World(seed, named=forged) as world:
        world.run()
        for check in CHECKS:
            check(world)
        assert len(world.side.ids) == 0
