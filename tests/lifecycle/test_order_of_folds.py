"""In which order projections fold: what has to fold before what, and that nothing else in the order matters."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest
from lifecycle_driver import Driver, play_seed
from starvation_guard import StarvationGuard

from kvledger.lifecycle import Core, Projections, Replay
from kvledger.lifecycle.projections import CORE_PROJECTIONS, IMAGES, OWED, RECORDS
from kvledger.lifecycle.replay import SequencedEvent

CORE = Core.standard().extended(StarvationGuard())
"""An extension has sub-states, and a projection that folds after those of the core."""
FOLDS_BEFORE = {"sub_states": "tracker"}
"""Projection → the one of its phase that has to fold after it, because it forgets what the first asks for."""


def is_allowed(order: tuple[str, ...]) -> bool:
    """Whether all that has to fold before something else does."""
    return all(
        order.index(first) < order.index(then) for first, then in FOLDS_BEFORE.items() if {first, then} <= set(order)
    )


RECORD_ORDERS = list(filter(is_allowed, permutations(RECORDS)))
IMAGE_ORDERS = list(filter(is_allowed, permutations(IMAGES)))


def walked(seed: int) -> Driver:
    """A walk in which requests are preempted, starve, and are reset."""
    chunk_size, block_size = ((8, 16), (16, 16), (32, 16))[seed % 3]
    return play_seed(
        seed,
        70,
        chunk_size=chunk_size,
        block_size=block_size,
        core=CORE,
        extensions={"starvation": {"num_preemptions": 1}},
    )


def projections_in(order: tuple[str, ...], driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Projections:
    """Projections that fold in this order."""
    with monkeypatch.context() as patch:
        patch.setattr("kvledger.lifecycle.projections.CORE_PROJECTIONS", order)
        projections = CORE.new_projections(driver.configuration)
    assert tuple(projections.named())[: len(order)] == order
    return projections


def states_after_each(projections: Projections, events: list[SequencedEvent]) -> list[dict[str, bytes]]:
    """What is known after each event."""
    states = []
    for sequence, event in events:
        projections.fold(event, sequence)
        states.append(projections.snapshot())
    return states


def test_the_order_is_one_of_those_that_are_allowed() -> None:
    """What is owed folds before everything, and records before what follows from them."""
    assert (*OWED, *RECORDS, *IMAGES) == CORE_PROJECTIONS
    assert RECORDS in RECORD_ORDERS
    assert IMAGES in IMAGE_ORDERS


@pytest.mark.parametrize("seed", range(9))
def test_within_a_phase_no_other_order_matters(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states are equal after every event, and every decision is made again."""
    driver, random = walked(seed), Random(seed)
    events = list(driver.sink.events())
    expected = states_after_each(projections_in(CORE_PROJECTIONS, driver, monkeypatch), events)
    for _ in range(4):
        order = (*OWED, *random.choice(RECORD_ORDERS), *random.choice(IMAGE_ORDERS))
        for (sequence, event), *states in zip(
            events, expected, states_after_each(projections_in(order, driver, monkeypatch), events), strict=True
        ):
            assert states[0] == states[1], (order, sequence, event)
        replay = Replay(CORE, driver.configuration, start=projections_in(order, driver, monkeypatch))
        replay.run(events)
        assert replay.divergences == [], order


@pytest.mark.parametrize(("first", "then"), FOLDS_BEFORE.items())
def test_what_has_to_fold_first_makes_a_difference(first: str, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round, a walk folds to something else."""
    order = list(CORE_PROJECTIONS)
    order.remove(first)
    order.insert(order.index(then) + 1, first)
    for seed in range(9):
        driver = walked(seed)
        events = list(driver.sink.events())
        folded = projections_in(CORE_PROJECTIONS, driver, monkeypatch)
        if states_after_each(folded, events) != states_after_each(
            projections_in(tuple(order), driver, monkeypatch), events
        ):
            return
    pytest.fail(f"{first} may fold after {then}")
