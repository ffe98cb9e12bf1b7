"""A cached hit never outlives what made it true."""

from __future__ import annotations

import msgspec
import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import events as e

KEYS = keys_of("d", 4)


def looked_up(**configuration: int) -> Driver:
    """Request `a` was answered with all four chunks of 16."""
    driver = Driver(chunk_size=16, **configuration)
    driver.save_prefix("earlier", KEYS)
    driver.arrive("a", 70, KEYS)
    assert driver.lookup("a", 0, 70).num_hit_tokens == 64
    return driver


def hit(driver: Driver) -> int:
    """Chunks that the cache finds now."""
    chunks: int = driver.projections.lookup_cache.num_hit_chunks(driver.record("a"))
    return chunks


def truth(driver: Driver) -> int:
    """Chunks that are there now."""
    keys = driver.record("a").keys
    committed: int = driver.projections.pool.num_committed(keys)
    return committed


def test_an_unchanged_hit_is_found_without_walking_the_keys() -> None:
    """That is what it is cached for: the same count, and no key is asked for."""
    driver = looked_up()

    driver.projections.pool.state.committed = OnlyTheLast()
    assert hit(driver) == 4


class OnlyTheLast(dict[bytes, bytes]):
    """Chunks that must not be counted again; those of a hit leave from its end."""

    def __contains__(self, key: object) -> bool:
        assert key == keys_of("d", 4)[3], "walked again"
        return True


def test_what_a_lookup_has_counted_is_not_counted_again() -> None:
    """Neither for its answer nor at the next lookup."""
    driver = looked_up()
    driver.projections.pool.state.committed = OnlyTheLast()
    driver.lookup("a", 0, 70)
    assert hit(driver) == 4


def test_the_count_is_not_taken_from_an_answer() -> None:
    """A handler may answer anything; the contract with vLLM compares its answers with this count."""
    driver = Driver(chunk_size=16)
    driver.save_prefix("earlier", KEYS[:2])
    driver.arrive("a", 70, KEYS)
    driver.observe(e.LookupRequested("a", 0, 70, 1))
    for num_hit_tokens in (64, 16, 0):
        driver.observe(e.LookupAnswered(*driver.record("a").life, 0, 70, num_hit_tokens, 0, False, "complete", 1))
        assert hit(driver) == truth(driver) == 2


@pytest.mark.parametrize(
    "event",
    [
        e.ChunksEvicted((KEYS[1],), "other", 9, 0, 1),
        e.ChunksTainted((KEYS[3],), 1),
        e.ChunkKeysObserved("a", 1, keys_of("other", 3)),
        e.ChunkKeysObserved("a", 0, keys_of("other", 1)),
        e.ChunkKeysObserved("a", 4, keys_of("other", 1)),
        e.CacheReset(1),
    ],
)
def test_the_count_follows_what_changes_it(event: e.Event) -> None:
    """As the hit does."""
    driver = looked_up()
    driver.observe(event)
    assert hit(driver) == truth(driver)


@pytest.mark.parametrize(
    ("event", "num_chunks"),
    [
        (e.ChunksEvicted((KEYS[1],), "other", 9, 0, 1), 1),
        (e.ChunksTainted((KEYS[3],), 1), 3),
        (e.ChunkKeysObserved("a", 1, keys_of("other", 3)), 1),
    ],
)
def test_a_chunk_that_leaves_or_is_another_shortens_the_hit(event: e.Event, num_chunks: int) -> None:
    """Also where it lies in the middle."""
    driver = looked_up()
    driver.observe(event)
    assert hit(driver) == truth(driver) == num_chunks


def test_other_keys_of_the_same_number_are_counted() -> None:
    """An embedder corrects the keys of a request that waits; the count that the contract made is of those before."""
    driver = Driver(chunk_size=16)
    driver.save_prefix("earlier", KEYS)
    driver.arrive("a", 70, (*KEYS[:2], b"x", b"y"))
    assert driver.lookup("a", 0, 70).num_hit_tokens == 32
    driver.keys("a", 2, KEYS[2:])
    assert hit(driver) == 4
    assert driver.lookup("a", 0, 70).num_hit_tokens == 64


def test_a_reset_ends_the_hit() -> None:
    """And the answer that was pending."""
    driver = looked_up()
    driver.reset()
    assert hit(driver) == 0
    assert driver.record("a").answer is None


def test_another_generation_does_not_see_the_hit() -> None:
    """What was found for an earlier generation is counted again."""
    driver = looked_up()
    record, hits = driver.record("a"), driver.projections.lookup_cache.state.hits
    hits[record.ordinal] = msgspec.structs.replace(
        hits[record.ordinal], num_chunks=1, last_key=KEYS[0], next_key=KEYS[1]
    )
    assert hit(driver) == 1
    record.generation += 1
    assert hit(driver) == truth(driver) == 4


def test_a_preemption_ends_hit_and_answer() -> None:
    """The next lookup starts from nothing."""
    driver = looked_up()
    record, hits = driver.record("a"), driver.projections.lookup_cache.state.hits
    hits[record.ordinal] = msgspec.structs.replace(
        hits[record.ordinal], num_chunks=1, last_key=KEYS[0], next_key=KEYS[1]
    )
    assert hit(driver) == 1
    driver.preempt("a", 0)
    assert (hit(driver), driver.record("a").answer) == (truth(driver), None)


def test_appended_keys_extend_the_hit_if_they_are_there() -> None:
    """Another request saved further chunks of the same text."""
    driver = Driver(chunk_size=16)
    driver.save_prefix("earlier", KEYS)
    driver.arrive("a", 70, KEYS[:2])
    assert driver.lookup("a", 0, 70).num_hit_tokens == 32
    driver.keys("a", 2, KEYS[2:])
    assert hit(driver) == truth(driver) == 4


def test_a_newly_committed_chunk_extends_the_hit() -> None:
    """Polled while a save was in flight, then again when it was there."""
    driver = Driver(chunk_size=16)
    driver.start("other", KEYS, 65, range(5))
    driver.preempt("other", 64)
    driver.arrive("a", 70, KEYS)
    assert driver.lookup("a", 0, 70).num_hit_tokens == 0
    driver.settle_all()
    assert hit(driver) == truth(driver) == 4


def test_a_removal_and_a_commit_together_are_both_seen() -> None:
    """Equal numbers of chunks before and after prove nothing."""
    driver = looked_up()
    driver.observe(e.ChunksEvicted((KEYS[0],), "other", 9, 0, 1))
    driver.save_prefix("other", keys_of("unrelated", 1))
    assert hit(driver) == truth(driver) == 0


def test_an_answer_is_pending_until_it_is_taken_up() -> None:
    """One allocation takes it; the next finds none."""
    driver = looked_up()
    assert driver.record("a").answer.num_external_tokens == 64
    driver.allocate("a", range(5), 64)
    assert (driver.record("a").answer, driver.record("a").claimed.num_external_tokens) == (None, 64)
    driver.allocate("a", range(5), 0)
    assert driver.record("a").claimed is None


def test_the_last_answer_is_the_pending_one() -> None:
    """There is one replaceable slot per request."""
    driver = looked_up()
    driver.lookup("a", 32, 70)
    assert driver.record("a").answer.num_external_tokens == 32
    assert len(driver.projections.lookup_cache) == 1


def test_a_finished_request_leaves_nothing() -> None:
    """Neither hit nor answer."""
    driver = looked_up()
    driver.allocate("a", range(5), 64)
    driver.finish("a", 0, 70)
    lookups = driver.projections.lookup_cache
    assert len(lookups) == 0


def deferred() -> Driver:
    """Preempted with its own save under way, request `a` was told twice to ask again."""
    driver = Driver(chunk_size=16, max_deferred_lookups=8)
    driver.start("a", KEYS, 65, range(5))
    driver.preempt("a", 64)
    for _ in range(2):
        driver.poll("a", 0, 65)
    assert driver.record("a").num_deferrals == 2
    return driver


def test_an_answer_ends_the_row() -> None:
    """The next deferral is the first again."""
    driver = deferred()
    driver.settle_all()
    driver.lookup("a", 0, 65)
    assert driver.record("a").num_deferrals == 0


def test_a_deferral_takes_the_pending_answer_back() -> None:
    """The scheduler was told to ask again, so there is nothing that it could take up."""
    driver = looked_up()
    assert driver.record("a").answer is not None
    driver.observe(e.LookupDeferred(*driver.record("a").life, 0, 70, 1, 1, 1))
    assert driver.record("a").answer is None


@pytest.mark.parametrize("event", ["preempted", "finished", "reset", "arrived"])
def test_what_ends_a_life_ends_the_row(event: str) -> None:
    """It was counted for something that is over."""
    driver = deferred()
    if event == "preempted":
        driver.allocate("a", range(5))
        driver.preempt("a", 0)
    elif event == "finished":
        driver.finish("a", 0, 65)
    elif event == "reset":
        driver.reset()
    else:
        driver.arrive("a", 65, KEYS)
    assert driver.record("a").num_deferrals == 0
