"""Random walks of the pure core, and a bounded search of its states.

A walk prints its seed when it fails; `WALK_SEED=7 pytest -k random_walk` plays only that one.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from lifecycle_driver import Walk
from lifecycle_driver.invariants import num_entries
from lifecycle_driver.search import Search

from kvledger.lifecycle import Core, Replay, fold
from kvledger.lifecycle import events as e

SEEDS = [int(os.environ["WALK_SEED"])] if "WALK_SEED" in os.environ else list(range(20))
GEOMETRIES = [(8, 16), (16, 16), (32, 16)]

searching = pytest.mark.xdist_group("search")
"""On one worker, so that what is found is found once."""


@pytest.mark.parametrize(("chunk_size", "block_size"), GEOMETRIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_walk_keeps_every_invariant(seed: int, chunk_size: int, block_size: int) -> None:
    """Slots, blocks, counts and pages are right after every event; released requests leave nothing behind;
    the log replays to the same state and the same decisions.
    """
    print(f"WALK_SEED={seed} chunk_size={chunk_size} block_size={block_size}")
    walk = Walk(seed, chunk_size=chunk_size, block_size=block_size)
    walk.run(70)
    driver = walk.driver
    rules = {event.rule for event in driver.all_of(e.InvariantViolated)}
    assert rules <= {"COMPLETION_ONCE", "LIVENESS"}, "only doubled and silent reports were played"
    assert not any(num_entries(driver.projections).values()), num_entries(driver.projections)
    committed = driver.projections.pool.state.committed.values()
    held = {slot for slots in committed for slot in slots} | set(driver.given_up)
    assert driver.projections.slots.num_free == driver.configuration.num_slots - len(held)
    events = driver.sink.events()
    assert [event for _, event in driver.events()] == driver.observed
    assert fold(Core.standard(), events, driver.configuration).snapshot() == driver.projections.snapshot()
    replay = Replay(Core.standard(), driver.configuration, reference=Core.standard().reference)
    replay.run(events)
    assert replay.divergences == []
    assert replay.reference_differences == []
    assert replay.projections.snapshot() == driver.projections.snapshot()


def test_the_random_walks_reach_what_they_are_for() -> None:
    """A walk that never recovers, fails, evicts or continues a session would prove nothing."""
    seen: set[type[e.Event]] = set()
    num_loads_checked = 0
    for seed in range(6):
        for chunk_size, block_size in GEOMETRIES:
            walk = Walk(seed, chunk_size=chunk_size, block_size=block_size)
            walk.run(70)
            seen |= {type(event) for _, event in walk.driver.sink.events()}
            num_loads_checked += walk.num_loads_checked
    assert num_loads_checked > 20
    never = {
        e.LoadRefused,  # where a hook fails
        *(e.PagesDigested, e.StepReported),  # a walk has no bytes, and no workers
        e.HooksExchanged,  # a walk has no hooks
        *(e.PrefixCacheReset, e.EndRefused),  # what vLLM or another connector does without a hook
        *(e.BlockTableObserved, e.DecisionWithheld, e.HookFailed, e.LogNote, e.RequestQuarantined, e.WindowLeft),
        *(e.ExtensionObserved, e.ExtensionNoted, e.ExtensionDecided, e.ExtensionStopped),
    }
    played = {event for event in Core.standard().events.values() if event.id != "load.errors_observed"}
    assert played - seen == never


@pytest.fixture(scope="module", params=[(8, 16), (16, 16)], ids=str)
def search(request: Any) -> Search:
    """Every state of two requests within reach, up to a limit."""
    chunk_size, block_size = request.param
    search = Search(chunk_size=chunk_size, block_size=block_size, max_states=1500)
    search.run()
    return search


@searching
def test_every_edge_of_the_search_keeps_the_invariants(search: Search) -> None:
    """The search checks after every event and names the path that broke one."""
    assert search.broken == []
    assert search.num_edges > 3000


@searching
def test_the_search_meets_every_state(search: Search) -> None:
    """All six, or it searched the wrong place."""
    assert {state for pair in search.states.values() for state in pair} >= {
        "new", "chunked_prefill", "running", "preempted", "recovering", "finished",
    }  # fmt: skip


@searching
def test_every_recovering_request_can_still_run_or_finish(search: Search) -> None:
    """From each state with a recovering request: reports and one step make it run, and it can be finished."""
    assert search.num_recovering > 50
    assert search.stuck == []
