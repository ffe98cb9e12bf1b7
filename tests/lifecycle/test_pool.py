"""What is in the host pool: commits, evictions, taints, resets, recency, pins, and pages shared by short chunks."""

from __future__ import annotations

import pytest
from lifecycle_driver import Driver, check_invariants, keys_of

from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.copies import CopyKind
from kvledger.lifecycle.snapshots import capture, restore


def committed(driver: Driver) -> list[bytes]:
    """Keys in the order in which they leave, and then those that somebody holds."""
    pool = driver.projections.pool
    leaving = list(pool.forest.leaving(None))
    return [*leaving, *(key for key in pool if key not in leaving)]


def saving(driver: Driver, num_chunks: int = 2, document: str = "d") -> e.SaveIssued:
    """A save in flight of a preempted request."""
    chunk_size = driver.configuration.chunk_size
    num_tokens = num_chunks * chunk_size + 1
    driver.start("a", keys_of(document, num_chunks), num_tokens, range(-(-num_tokens // 16)))
    driver.preempt("a", num_tokens - 1)
    return driver.all_of(e.SaveIssued)[-1]


def leaving_order(driver: Driver, num_chunks: int) -> list[bytes]:
    """The keys that leave, one after the other, when another request needs the whole pool."""
    driver.save_prefix("greedy", keys_of("greedy", num_chunks), first_block=500)
    check_invariants(driver.projections)
    return [key for event in driver.all_of(e.ChunksEvicted) for key in event.keys]


def test_a_chunk_is_there_from_the_completion_of_its_save_on() -> None:
    """Before, it is in flight and cannot be looked up."""
    driver = Driver(chunk_size=16)
    save = saving(driver)
    key = keys_of("d", 1)[0]
    chunks = driver.projections.pool
    assert (chunks.get(key), chunks.is_saving(key)) == (None, True)
    driver.report(save.job_id)
    assert (chunks.get(key), chunks.is_saving(key)) == (save.slots[:1], False)


def test_a_failed_save_leaves_nothing() -> None:
    """No chunk, no reference, nothing in flight."""
    driver = Driver(chunk_size=16)
    save = saving(driver)
    driver.report(save.job_id, ok=False)
    chunks = driver.projections.pool
    assert (len(chunks), chunks.slots.num_free, chunks.is_saving(keys_of("d", 1)[0])) == (0, 32, False)


def test_chunks_are_counted_up_to_the_first_gap() -> None:
    """What lies behind a gap cannot be loaded as a prefix."""
    driver = Driver(chunk_size=16)
    keys = keys_of("d", 4)
    driver.save_prefix("a", keys)
    chunks = driver.projections.pool
    assert chunks.num_committed(keys) == 4
    driver.observe(e.ChunksTainted((keys[2],), 1))
    assert chunks.num_committed(keys) == 2
    assert chunks.num_committed(keys[3:]) == 1


@pytest.mark.parametrize("event_class", [e.ChunksEvicted, e.ChunksTainted, e.CacheReset])
def test_nothing_is_remembered_of_a_chunk_that_leaves(event_class: type[e.Event]) -> None:
    """The pool is what it was before; the log knows the rest."""
    driver = Driver(chunk_size=16)
    (key,) = keys_of("d", 1)
    driver.save_prefix("a", (key,))
    arguments = {e.ChunksEvicted: ((key,), "b", 1, 0, 1), e.ChunksTainted: ((key,), 1), e.CacheReset: (1,)}
    driver.observe(event_class(*arguments[event_class]))
    assert (len(driver.projections.pool), committed(driver)) == (0, [])
    assert driver.projections.slots.num_free == 32


@pytest.mark.parametrize("chunk_size", [8, 16, 32])
def test_the_end_of_a_prefix_leaves_before_its_beginning(chunk_size: int) -> None:
    """Without its beginning a prefix is worth nothing."""
    pages = max(1, chunk_size // 16)
    num_chunks = 8 if chunk_size == 8 else 4
    num_slots = num_chunks * chunk_size // 16
    driver = Driver(chunk_size=chunk_size, num_slots=num_slots)
    keys = keys_of("d", num_chunks)
    driver.save_prefix("a", keys)
    assert leaving_order(driver, num_slots * 16 // chunk_size) == list(reversed(keys))
    assert pages * num_chunks >= num_slots


def test_a_prefix_that_was_saved_piece_by_piece_loses_its_end_first_too() -> None:
    """A decoding request saves a chunk now and then; its first chunk must not become the oldest of them."""
    driver = Driver(chunk_size=16, num_slots=3)
    keys = keys_of("d", 3)
    driver.start("a", keys, 50, (1, 2, 3, 4))
    for chunk in range(3):
        driver.step(settled=[("a", chunk, 16 * (chunk + 1))])
        driver.settle_all()
    driver.finish("a", 49, 50)
    driver.save_prefix("b", keys_of("other", 1))
    assert driver.all_of(e.ChunksEvicted)[0].keys == (keys[2],)


FIRST, SECOND = keys_of("first", 2), keys_of("second", 2)


def asked_for_the_first_of_two() -> Driver:
    """A full pool of two prefixes; request `c` has arrived and asks for the one that was saved first."""
    driver = Driver(chunk_size=16, num_slots=4)
    driver.save_prefix("a", FIRST)
    driver.save_prefix("b", SECOND)
    driver.arrive("c", 33, FIRST)
    return driver


def test_a_load_makes_a_prefix_young_again() -> None:
    """The other one leaves first, its end before its beginning."""
    driver = asked_for_the_first_of_two()
    driver.lookup("c", 0, 33)
    driver.allocate("c", (1, 2, 3), 32)
    driver.settle_all()
    assert leaving_order(driver, 4) == [SECOND[1], SECOND[0], FIRST[1], FIRST[0]]


def test_a_lookup_that_promises_nothing_makes_nothing_young() -> None:
    """It changes nothing, also not an order."""
    driver = asked_for_the_first_of_two()
    before = committed(driver)
    driver.lookup("c", 32, 33)
    assert committed(driver) == before


def test_what_was_promised_and_is_not_claimed_is_young() -> None:
    """As a block of vLLM's that nobody holds any more: it comes to the end of the queue."""
    driver = asked_for_the_first_of_two()
    driver.lookup("c", 0, 33)
    driver.lookup("c", 32, 33)
    assert committed(driver) == [SECOND[1], SECOND[0], FIRST[1], FIRST[0]]


# --- pins ----------------------------------------------------------------------------------------


def promised(**configuration: int) -> Driver:
    """Request `b` was answered with both chunks of a pool of two."""
    driver = Driver(chunk_size=16, num_slots=2, **configuration)
    driver.save_prefix("a", keys_of("d", 2))
    driver.arrive("b", 33, keys_of("d", 2))
    driver.lookup("b", 0, 33)
    return driver


def can_be_evicted(driver: Driver) -> bool:
    """Whether another request gets any room."""
    driver.save_prefix("greedy", keys_of("greedy", 1), first_block=500)
    return bool(driver.all_of(e.ChunksEvicted))


def test_an_answer_that_is_withheld_promises_nothing() -> None:
    """World 3152: the promise stayed, and an audit that began after it did not know why a save was declined."""
    driver = promised()
    driver.observe(e.DecisionWithheld("b", "", "the event log could not be written", 9))
    assert driver.projections.pool.promised == {}
    assert can_be_evicted(driver)
    driver.ledger.commit()
    assert driver.audited().violations == []


def test_promised_chunks_stay() -> None:
    """From the answer to the allocation."""
    assert not can_be_evicted(promised())


def test_polling_again_and_again_promises_once() -> None:
    """One allocation, one finish or one preemption releases all of it."""
    driver = promised()
    for _ in range(5):
        driver.lookup("b", 0, 33)
    driver.allocate("b", (1, 2, 3), 0)
    assert can_be_evicted(driver)


@pytest.mark.parametrize("event", ["allocated", "finished", "preempted", "arrived again", "answered with nothing"])
def test_a_promise_ends(event: str) -> None:
    """By every way out of waiting, not only by the one that loads."""
    driver = promised()
    if event == "allocated":
        driver.allocate("b", (1, 2, 3), 0)
    elif event == "finished":
        driver.finish("b", 0, 33)
    elif event == "preempted":
        driver.preempt("b", 0)
    elif event == "arrived again":
        driver.arrive("b", 33)
    else:
        driver.lookup("b", 32, 33)
    assert driver.projections.pool.promised == {}
    assert can_be_evicted(driver)


def test_two_promises_of_one_chunk_end_one_by_one() -> None:
    """The first to leave does not release the other's."""
    driver = promised()
    driver.arrive("c", 33, keys_of("d", 2))
    driver.lookup("c", 0, 33)
    driver.finish("b", 0, 33)
    assert not can_be_evicted(driver)
    driver.finish("c", 0, 33)
    assert can_be_evicted(driver)


# --- pages shared by chunks shorter than a block -------------------------------------------------


def test_chunks_of_one_block_share_one_slot() -> None:
    """Two chunks of 8 on a block of 16 need one page."""
    driver = Driver(chunk_size=8, num_slots=4)
    driver.save_prefix("a", keys_of("d", 2))
    assert driver.projections.pool.get(keys_of("d", 2)[0]) == driver.projections.pool.get(keys_of("d", 2)[1])
    assert driver.projections.slots.num_free == 3


def test_a_longer_image_of_a_block_replaces_the_shorter_one() -> None:
    """The slot of the half-filled page is free again, exactly once."""
    driver = Driver(chunk_size=8, num_slots=4)
    keys = keys_of("d", 2)
    driver.start("a", keys, 17, (1, 2))
    driver.step(settled=[("a", 0, 8)])
    driver.settle_all()
    short = driver.projections.pool.get(keys[0])
    driver.step(settled=[("a", 1, 16)])
    driver.settle_all()
    long = driver.projections.pool.get(keys[1])
    assert driver.projections.pool.get(keys[0]) == long != short
    assert driver.projections.slots.num_free == 3
    check_invariants(driver.projections)


def test_a_longer_image_does_not_bring_back_a_chunk_that_was_not_there() -> None:
    """Only what is committed is moved to the new page."""
    driver = Driver(chunk_size=8, num_slots=4)
    keys = keys_of("d", 2)
    driver.start("a", keys, 17, (1, 2))
    driver.step(settled=[("a", 0, 8)])
    driver.settle_all()
    driver.observe(e.ChunksTainted((keys[0],), 1))
    driver.step(settled=[("a", 1, 16)])
    driver.settle_all()
    assert driver.projections.pool.get(keys[0]) is None
    assert driver.projections.pool.get(keys[1]) is not None


def test_a_shared_page_is_free_when_its_last_chunk_has_left() -> None:
    """Not before, and not twice."""
    driver = Driver(chunk_size=8, num_slots=4)
    keys = keys_of("d", 2)
    driver.save_prefix("a", keys)
    driver.observe(e.ChunksTainted((keys[1],), 1))
    assert driver.projections.slots.num_free == 3
    driver.observe(e.ChunksTainted((keys[0],), 1))
    driver.observe(e.ChunksTainted((keys[0],), 1))
    assert driver.projections.slots.num_free == 4
    check_invariants(driver.projections)


def test_a_page_that_a_load_reads_survives_the_eviction_of_its_chunks() -> None:
    """A reset while loading: the slot is free only when the load is reported."""
    driver = promised()
    driver.allocate("b", (1, 2, 3), 32)
    driver.reset()
    assert driver.projections.slots.num_free == 0
    driver.settle_all()
    assert driver.projections.slots.num_free == 2


def test_prefixes_that_part_inside_a_block_keep_their_own_images() -> None:
    """The common half is found in either page, each other half only in its own."""
    driver = Driver(chunk_size=8, num_slots=4)
    common = keys_of("common", 1)
    one, two = (*common, *keys_of("one", 1)), (*common, *keys_of("two", 1))
    driver.save_prefix("a", one, first_block=10)
    driver.save_prefix("b", two, first_block=20)
    chunks = driver.projections.pool
    assert chunks.get(one[1]) != chunks.get(two[1])
    assert chunks.get(common[0]) in {chunks.get(one[1]), chunks.get(two[1])}
    check_invariants(driver.projections)


def test_chunks_whose_loads_failed_leave_nothing_behind() -> None:
    """They were remembered until something was evicted: a pool that never fills, and whose loads fail, would grow."""
    driver = Driver(chunk_size=16, num_slots=64)
    for number in range(10):
        keys = keys_of(f"document {number}", 4)
        driver.save_prefix(f"earlier {number}", keys)
        driver.arrive(f"later {number}", 65, keys)
        driver.lookup(f"later {number}", 0, 65)
        driver.allocate(f"later {number}", (1, 2, 3, 4, 5), 64)
        (load,) = (job for job in driver.projections.jobs if job.kind is CopyKind.LOAD)
        driver.report(load.job_id, ok=False)
        driver.finish(f"later {number}", 0, 65)
        driver.settle_all()
    state = driver.projections.pool.state
    assert (state.committed, state.parent_of, list(state.queue)) == ({}, {}, [])


@pytest.mark.parametrize(
    "second",
    [e.LoadCompleted("a", 0, 0, 1, 1), e.SaveIssued("a", 0, 0, 1, (1,), (1,), (2,), False, False, 1)],
    ids=["settled as a load", "issued again"],
)
def test_a_log_that_uses_the_number_of_a_save_twice_is_restored_as_it_was(second: e.Event) -> None:
    """What is being saved follows from the copies in flight, also where no connector would write such a log."""
    core, configuration = Core.standard(), LedgerConfiguration(16, 16, num_slots=6)
    projections = core.new_projections(configuration)
    arrived, keys = e.RequestArrived("a", 0, 48, 1), (b"a", b"b", b"c")
    issued = e.SaveIssued("a", 0, 0, 1, (0,), (0,), (1,), False, False, 1)
    for sequence, event in enumerate((arrived, e.ChunkKeysObserved("a", 0, keys), issued, second), 1):
        projections.fold(event, sequence)
    restored = restore(core, capture(projections), configuration)
    assert [*map(projections.pool.is_saving, keys)] == [*map(restored.pool.is_saving, keys)]
