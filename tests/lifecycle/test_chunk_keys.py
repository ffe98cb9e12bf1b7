"""The chunk keys of a request: appended as tokens become known, replaced where they change."""

from __future__ import annotations

from lifecycle_driver import Driver, keys_of

KEYS = keys_of("d", 6)


def keys(driver: Driver) -> list[bytes]:
    """The keys of request `a`."""
    return list(driver.record("a").keys)


def test_keys_are_appended_in_chunk_order() -> None:
    """As the request grows."""
    driver = Driver()
    driver.arrive("a", 33, KEYS[:4])
    driver.keys("a", 4, KEYS[4:])
    assert keys(driver) == list(KEYS)


def test_keys_from_a_chunk_on_replace_all_that_followed() -> None:
    """A session's next turn changes its tail; no old key may survive behind a new one."""
    driver = Driver()
    driver.arrive("a", 33, KEYS)
    driver.keys("a", 2, keys_of("other", 1))
    assert keys(driver) == [*KEYS[:2], *keys_of("other", 1)]


def test_keys_survive_a_preemption() -> None:
    """The tokens are still the same."""
    driver = Driver()
    driver.start("a", KEYS[:2], 17, (1, 2))
    driver.preempt("a", 16)
    assert keys(driver) == list(KEYS[:2])


def test_a_released_request_leaves_no_keys() -> None:
    """Neither does an unknown one."""
    driver = Driver()
    driver.arrive("a", 17, KEYS[:2])
    driver.finish("a", 0, 17)
    driver.keys("ghost", 0, KEYS)
    assert len(driver.projections.tracker) == 0


def test_keys_that_leave_a_gap_are_not_taken_for_the_chunks_before() -> None:
    """Chunk 3's key must never be looked up as chunk 1's: that would load another chunk's tokens."""
    driver = Driver()
    driver.arrive("a", 40, KEYS[:1])
    driver.keys("a", 3, KEYS[3:4])
    assert keys(driver)[:2] != [KEYS[0], KEYS[3]]
