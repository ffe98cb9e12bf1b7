"""Who leaves a full pool: what nobody waits for, never what a preempted request will come back for."""

from __future__ import annotations

from typing import Any

from lifecycle_driver import Driver
from lifecycle_driver.driver import keys_of

from kvledger.lifecycle import Core, Extension
from kvledger.lifecycle import events as e


def full_pool(**configuration: Any) -> Driver:
    """Four slots: two chunks of a preempted request, older than two that nobody waits for."""
    driver = Driver(chunk_size=16, block_size=16, num_slots=4, save_tails=False, **configuration)
    driver.start("waiting", keys_of("waiting", 2), 33, (1, 2, 3))
    driver.preempt("waiting", 32)
    driver.settle_all()
    driver.save_prefix("idle", keys_of("idle", 2))
    return driver


def crowd_out(driver: Driver, num_chunks: int) -> list[e.Event]:
    """Another request wants to save so many chunks."""
    driver.start("new", keys_of("new", num_chunks), num_chunks * 16 + 1, range(10, 11 + num_chunks))
    return driver.preempt("new", num_chunks * 16)


def test_what_a_preempted_request_will_come_back_for_stays() -> None:
    """Older or not, the idle chunks go first."""
    driver = full_pool()
    crowd_out(driver, 2)
    assert {key for event in driver.all_of(e.ChunksEvicted) for key in event.keys} == set(keys_of("idle", 2))
    assert driver.lookup("waiting", 0, 33).num_external_tokens == 32


def test_by_recency_alone_they_would_have_gone() -> None:
    """The same story with plain LRU."""
    driver = full_pool(keep_for_preempted=False)
    crowd_out(driver, 2)
    assert {key for event in driver.all_of(e.ChunksEvicted) for key in event.keys} == set(keys_of("waiting", 2))
    assert driver.lookup("waiting", 0, 33).num_external_tokens == 0


def test_a_pool_full_of_wanted_chunks_declines_new_saves() -> None:
    """Two of three chunks find room, the third would cost a waiting request its own."""
    driver = full_pool()
    decisions = crowd_out(driver, 3)
    (saved,) = [decision for decision in decisions if isinstance(decision, e.SaveIssued)]
    (declined,) = [decision for decision in decisions if isinstance(decision, e.SaveDeclined)]
    assert saved.chunks == (0, 1)
    assert (declined.first_chunk, declined.num_chunks, declined.reason) == (2, 1, "pool_full")


def test_once_it_has_blocks_again_its_chunks_are_like_any_others() -> None:
    """Nobody waits for them any more."""
    driver = full_pool()
    driver.lookup("waiting", 0, 33)
    driver.allocate("waiting", (4, 5, 6), 0)
    driver.step(("waiting", 0, 33, 33))
    crowd_out(driver, 3)
    assert set(keys_of("waiting", 2)) & {key for event in driver.all_of(e.ChunksEvicted) for key in event.keys}


def test_once_it_has_finished_too() -> None:
    """An aborted request never comes back."""
    driver = full_pool()
    driver.finish("waiting", 0, 33)
    crowd_out(driver, 4)
    assert driver.totals.figures.num_chunks_evicted == 4


# --- what room costs -----------------------------------------------------------------------------


def test_an_extension_is_asked_about_chunks_that_are_about_to_leave_and_about_no_others() -> None:
    """It was asked for all it wants to keep, once for each chunk: with 4,000 chunks one step took 904 ms."""
    asked = []

    class Keeping(Extension):
        name = "keeping"

        def keeps(self, _projections: Any, key: bytes) -> bool:
            asked.append(key)
            return False

    driver = Driver(chunk_size=16, num_slots=64, save_tails=False, core=Core.standard().extended(Keeping()))
    driver.save_prefix("idle", keys_of("idle", 64))
    crowd_out(driver, 40)
    assert driver.totals.figures.num_chunks_evicted == 40
    assert asked == [key for event in driver.all_of(e.ChunksEvicted) for key in event.keys]


def num_hashed(num_chunks: int) -> int:
    """How often keys are hashed while so many chunks are saved into a full pool."""
    hashed = []

    class Key(bytes):
        __slots__ = ()

        def __hash__(self) -> int:
            hashed.append(1)
            return super().__hash__()

    driver = Driver(chunk_size=16, num_slots=num_chunks, save_tails=False)
    driver.save_prefix("idle", keys_of("idle", num_chunks))
    keys = [Key(key) for key in keys_of("new", num_chunks)]
    driver.start("new", keys, num_chunks * 16 + 1, range(10, 11 + num_chunks))
    hashed.clear()
    driver.preempt("new", num_chunks * 16)
    assert driver.totals.figures.num_chunks_evicted == num_chunks
    return len(hashed)


def test_the_cost_of_a_save_grows_with_its_chunks_and_not_with_their_square() -> None:
    """The set of the request's own chunks was built anew for each of them."""
    assert num_hashed(80) <= 2 * num_hashed(40)
