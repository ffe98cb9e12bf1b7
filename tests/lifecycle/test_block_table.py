"""Which blocks a request holds: replaced or extended as told, never appended blindly."""

from __future__ import annotations

from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import events as e


def running(block_ids: tuple[int, ...] = (1, 2)) -> Driver:
    """A request that holds blocks."""
    driver = Driver()
    driver.start("a", keys_of("a", 2), 20, block_ids)
    return driver


def held(driver: Driver, request_id: str = "a") -> list[int]:
    """Its blocks now."""
    return list(driver.record(request_id).block_ids or ())


def lost(driver: Driver) -> list[int]:
    """Blocks it was just deprived of."""
    return list(driver.record("a").lost_block_ids or ())


def test_an_allocation_tells_the_whole_table() -> None:
    """The second one replaces the first, it is not appended (a streaming session's next turn does this)."""
    driver = Driver()
    driver.arrive("a", 40)
    driver.allocate("a", (1, 2))
    driver.allocate("a", (1, 2, 3))
    assert held(driver) == [1, 2, 3]


def test_a_step_extends_the_tables_it_names() -> None:
    """By ordinal, in order."""
    driver = running()
    driver.step(extended=[("a", (7,))])
    driver.step(extended=[("a", (5, 6))])
    assert held(driver) == [1, 2, 7, 5, 6]


def test_an_observed_table_replaces_what_was_folded() -> None:
    """The scheduler's own table wins."""
    driver = running()
    driver.observe(e.BlockTableObserved("a", (8, 9), 1))
    assert held(driver) == [8, 9]


def test_a_preempted_request_holds_nothing_and_its_lost_blocks_last_until_the_next_step() -> None:
    """From that step's forward on, they may be overwritten."""
    driver = running()
    driver.preempt("a", 20)
    assert (held(driver), lost(driver)) == ([], [1, 2])
    driver.step()
    assert (held(driver), lost(driver)) == ([], [])


def test_a_finished_request_holds_nothing() -> None:
    """Its blocks are lost like those of a preempted one."""
    driver = running()
    driver.finish("a", 16, 21)
    assert (held(driver), lost(driver)) == ([], [1, 2])


def test_a_resumed_request_holds_its_new_blocks_only() -> None:
    """The old table does not come back."""
    driver = running()
    driver.preempt("a", 20)
    driver.lookup("a", 0, 21)
    driver.allocate("a", (30, 31))
    assert held(driver) == [30, 31]
    driver.step(("a", 0, 21, 21), extended=[("a", (32,))])
    assert held(driver) == [30, 31, 32]


def test_blocks_of_unknown_requests_are_not_kept() -> None:
    """Neither by id nor by ordinal."""
    driver = Driver()
    driver.observe(e.BlocksAllocated("ghost", (1, 2), 0, 1))
    driver.observe(e.StepScheduled(0, 1, (), (), ((99, (1,)),), (), 1))
    assert len(driver.projections.tracker) == 0


def test_a_second_life_of_an_id_does_not_inherit_blocks() -> None:
    """Also not when the first life never ended."""
    driver = running()
    driver.arrive("a", 20)
    assert held(driver) == []
