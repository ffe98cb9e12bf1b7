"""Groups with sliding windows: what is saved of them, where a load may end, and what it brings.

Blocks of 16 tokens. Group 0 sees everything, group 1 the last 32 tokens; the flat table has one entry for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import ConfigurationError, Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.events import NO_SLOT

WINDOWS = (0, 32)


def driver_of(chunk_size: int = 32, num_slots: int = 64, **configuration: object) -> Driver:
    """A ledger for two groups."""
    return Driver(chunk_size=chunk_size, num_slots=num_slots, **{"windows": WINDOWS, **configuration})


def table(num_blocks: int, first_block: int = 1, first_kept: int = 0) -> tuple[int, ...]:
    """Blocks of both groups interleaved; those of the window's group begin at `first_kept`."""
    flat = []
    for block in range(num_blocks):
        flat += [first_block + 2 * block, first_block + 2 * block + 1 if block >= first_kept else 0]
    return tuple(flat)


def start(driver: Driver, request_id: str, keys: Sequence[bytes], num_tokens: int, first_block: int = 1) -> None:
    """Let a request compute its whole prompt in one step."""
    driver.start(request_id, keys, num_tokens, table(-(-num_tokens // 16), first_block))


def settle(driver: Driver, request_id: str, num_tokens: int) -> None:
    """One more decoded token, and what is settled by then; its copies are done."""
    begins_a_block = len(driver.record(request_id).block_ids or ()) == num_tokens // 16 * len(WINDOWS)
    extended = [(request_id, (800 + num_tokens, 801 + num_tokens))] if begins_a_block else ()
    driver.step((request_id, num_tokens, 1, num_tokens + 1), settled=[(request_id, 0, num_tokens)], extended=extended)
    driver.settle_all()


def copied(event: e.SaveIssued | e.TailSaveIssued | e.LoadIssued, group: int) -> list[int]:
    """The blocks of a group that are copied."""
    pairs = list(zip(event.block_ids, event.slots, strict=True))[group :: len(WINDOWS)]
    return [block_id for block_id, slot in pairs if slot != NO_SLOT]


def assert_sound(driver: Driver) -> None:
    """Replay and every checker agree with what was decided."""
    driver.ledger.commit()
    audit = Audit(Core.standard(), driver.configuration)
    audit.run(driver.sink.events())
    assert audit.violations == []
    assert list(audit.divergences) == []
    assert audit.is_sound
    assert audit.projections.snapshot() == driver.projections.snapshot()


def test_behind_a_window_nothing_is_saved() -> None:
    """Of 96 settled tokens the window still has the blocks from token 65 on; all of them are full attention's."""
    driver = driver_of()
    start(driver, "a", keys_of("a", 3), 96)
    settle(driver, "a", 96)
    (save,) = driver.all_of(e.SaveIssued)
    assert save.chunks == (0, 1, 2)
    assert copied(save, group=0) == [1, 3, 5, 7, 9, 11]
    assert copied(save, group=1) == [10, 12]
    assert len(set(save.slots) - {NO_SLOT}) == 8
    assert driver.projections.slots.num_free == 64 - 8
    assert_sound(driver)


def test_a_load_ends_where_the_window_is_stored_and_brings_only_what_it_sees() -> None:
    """A sharer of the whole prompt is served to its end; a sharer of less has nothing to stand on."""
    driver = driver_of()
    start(driver, "a", keys_of("a", 3), 96)
    settle(driver, "a", 96)
    driver.arrive("b", 100, keys_of("a", 3))
    answer = driver.lookup("b", 0, 100)
    assert (answer.num_hit_tokens, answer.num_external_tokens) == (96, 96)
    assert answer.is_async
    driver.allocate("b", table(6, first_block=50, first_kept=4), 96)
    (load,) = driver.all_of(e.LoadIssued)
    assert copied(load, group=0) == [50, 52, 54, 56, 58, 60]
    assert copied(load, group=1) == [59, 61]
    driver.settle_all()
    driver.arrive("c", 90, keys_of("a", 2))
    answer = driver.lookup("c", 0, 90)
    assert (answer.num_hit_tokens, answer.num_external_tokens) == (64, 0)
    assert answer.miss_reason == e.MissReason.WINDOW
    assert_sound(driver)


def test_the_last_token_of_a_prompt_may_need_one_block_more() -> None:
    """96 tokens leave 95 to load, and the token behind those sees one that the token behind 96 does not."""
    driver = driver_of(windows=(0, 33))
    start(driver, "a", keys_of("a", 3), 97)
    settle(driver, "a", 97)
    assert copied(driver.all_of(e.SaveIssued)[0], group=1) == [10, 12]  # from token 64 on
    driver.arrive("b", 96, keys_of("a", 3))
    assert driver.lookup("b", 0, 96).num_external_tokens == 0
    driver.arrive("c", 97, keys_of("a", 3))
    assert driver.lookup("c", 0, 97).num_external_tokens == 96
    assert_sound(driver)


def test_what_a_window_leaves_is_saved_in_time_for_the_last_whole_chunk() -> None:
    """90 tokens came in one step: block 2 is free by now, and yet the end of chunk 1 at token 64 can be loaded."""
    driver = driver_of()
    start(driver, "a", keys_of("a", 2), 90)
    driver.observe(e.WindowLeft("a", 0, 1))
    settle(driver, "a", 90)
    (save,) = driver.all_of(e.SaveIssued)
    assert copied(save, group=1) == [6, 8], "blocks 2 and 3; what the boundary does not see is not worth a slot"
    assert save.before_forward
    driver.arrive("b", 95, keys_of("a", 2))
    assert driver.lookup("b", 0, 95).num_external_tokens == 64
    assert_sound(driver)


def test_what_the_window_had_left_a_step_before_is_gone() -> None:
    """80 tokens were settled then, so block 2 was freed then, and the end of chunk 1 cannot be had any more."""
    driver = driver_of()
    start(driver, "a", keys_of("a", 2), 90)
    driver.observe(e.WindowLeft("a", 80, 1))
    settle(driver, "a", 90)
    (save,) = driver.all_of(e.SaveIssued)
    assert copied(save, group=1) == [8]
    assert not save.before_forward
    driver.step(("a", 91, 1, 92))
    assert driver.record("a").window_freed_before_step is None


def test_what_was_told_before_another_step_does_not_count() -> None:
    """Blocks that were free in the step before have been written by its forward."""
    driver = driver_of()
    start(driver, "a", keys_of("a", 3), 96)
    driver.observe(e.WindowLeft("a", 0, 1))
    driver.step()
    driver.preempt("a", 96)
    (save,) = driver.all_of(e.SaveIssued)
    assert copied(save, group=1) == [10, 12]
    assert_sound(driver)


def test_a_request_that_ends_right_after_its_prefill_leaves_a_boundary() -> None:
    """What its windows leave at its end is intact until the next forward."""
    driver = driver_of()
    start(driver, "a", keys_of("a", 2), 90)
    driver.observe(e.WindowLeft("a", 0, 1))
    driver.finish("a", 90, 91)
    driver.settle_all()
    driver.arrive("b", 95, keys_of("a", 2))
    assert driver.lookup("b", 0, 95).num_external_tokens == 64
    assert_sound(driver)


def test_a_prefix_that_is_shared_can_be_loaded_from_the_third_request_on() -> None:
    """The second finds all chunks and nothing that a window could stand on there; it leaves that behind."""
    driver = driver_of()
    start(driver, "first", keys_of("system", 4), 130)
    settle(driver, "first", 130)
    shared = keys_of("system", 2)
    driver.arrive("second", 130, shared + keys_of("second", 2, 2))
    assert driver.lookup("second", 0, 130).miss_reason == e.MissReason.WINDOW
    driver.allocate("second", table(9, first_block=100))
    driver.step(("second", 0, 130, 130))
    driver.observe(e.WindowLeft("second", 0, 1))
    settle(driver, "second", 130)
    driver.arrive("third", 100, shared)
    assert driver.lookup("third", 0, 100).num_external_tokens == 64
    assert_sound(driver)


def test_whoever_still_sees_a_page_completes_a_chunk_that_lacks_it() -> None:
    """A long request saved the chunk without it; a shorter one brings what is missing, and nothing twice."""
    driver = driver_of()
    start(driver, "long", keys_of("a", 3), 96)
    settle(driver, "long", 96)
    start(driver, "short", keys_of("a", 2), 66, first_block=50)
    driver.step(("short", 66, 1, 67), settled=[("short", 0, 66)])
    _, completing = driver.all_of(e.SaveIssued)
    assert completing.chunks == (1,)
    assert copied(completing, group=0) == []
    assert copied(completing, group=1) == [55, 57]
    driver.settle_all()
    driver.arrive("c", 90, keys_of("a", 2))
    assert driver.lookup("c", 0, 90).num_external_tokens == 64
    assert_sound(driver)


def test_a_chunk_that_was_evicted_meanwhile_is_not_half_there() -> None:
    """What was to complete it comes too late and is dropped; no slot is lost."""
    driver = driver_of()
    start(driver, "long", keys_of("a", 3), 96)
    settle(driver, "long", 96)
    start(driver, "short", keys_of("a", 2), 66, first_block=50)
    driver.step(("short", 66, 1, 67), settled=[("short", 0, 66)])
    driver.observe(e.ChunksTainted((keys_of("a", 2)[1],), 1))
    driver.settle_all()
    assert driver.projections.pool.get(keys_of("a", 2)[1]) is None
    assert driver.projections.slots.num_free == 64 - 6


@pytest.mark.parametrize("chunk_size", [8, 16, 32, 64])
@pytest.mark.parametrize("num_tokens", range(33, 140, 7))
def test_a_preempted_request_comes_back_to_its_last_token(chunk_size: int, num_tokens: int) -> None:
    """Whatever was saved before, chunks and tail together hold all that the next token sees."""
    driver = driver_of(chunk_size)
    keys = keys_of("a", 140 // chunk_size)
    start(driver, "a", keys[: 30 // chunk_size], 30)
    # Somebody with the same beginning went on, and has saved what he still saw.
    start(driver, "other", keys, 140, first_block=100)
    settle(driver, "other", 140)
    driver.keys("a", 30 // chunk_size, keys[30 // chunk_size : num_tokens // chunk_size])
    driver.step(("a", 30, num_tokens - 30, num_tokens), extended=[("a", table(-(-num_tokens // 16))[4:])])
    driver.preempt("a", num_tokens)
    driver.settle_all()
    answer = driver.lookup("a", 0, num_tokens + 1)
    assert answer.num_external_tokens == num_tokens
    first_kept = (num_tokens - 31) // 16
    driver.allocate("a", table(num_tokens // 16 + 1, first_block=300, first_kept=first_kept), num_tokens)
    (load,) = driver.all_of(e.LoadIssued)
    assert len(copied(load, group=1)) == -(-num_tokens // 16) - first_kept
    driver.settle_all()
    driver.step(("a", num_tokens, 1, num_tokens + 1))
    assert_sound(driver)


def test_a_local_hit_shortens_the_load_of_every_group() -> None:
    """What the prefix cache has is not loaded; of the window only the rest that it sees."""
    driver = driver_of()
    start(driver, "a", keys_of("a", 3), 96)
    settle(driver, "a", 96)
    driver.arrive("b", 100, keys_of("a", 3))
    assert driver.lookup("b", 80, 100).num_external_tokens == 16
    driver.allocate("b", table(7, first_block=50, first_kept=4), 16)
    (load,) = driver.all_of(e.LoadIssued)
    assert (load.first_token, copied(load, 0), copied(load, 1)) == (80, [60], [61])
    assert_sound(driver)


def test_loads_of_models_with_windows_come_one_after_another() -> None:
    """VLLM underestimates what a loaded request still needs; two of them could wait for one another for ever."""
    driver = driver_of(max_deferred_lookups=1)
    start(driver, "a", keys_of("a", 3), 96)
    settle(driver, "a", 96)
    for request_id in ("b", "c"):
        driver.arrive(request_id, 100, keys_of("a", 3))
    driver.lookup("b", 0, 100)
    driver.allocate("b", table(7, first_block=50, first_kept=4), 96)
    assert isinstance(driver.poll("c", 0, 100), e.LookupDeferred)
    assert driver.lookup("c", 0, 100).num_external_tokens == 0, "nobody waits for ever"
    driver.settle_all()
    driver.step(("b", 96, 4, 100))
    assert driver.lookup("c", 0, 100).num_external_tokens == 96
    assert_sound(driver)


def test_a_page_without_a_slot_is_not_promised_after_all() -> None:
    """If vLLM gave a block for what is not stored, the load is refused and the request recomputes."""
    driver = driver_of()
    start(driver, "a", keys_of("a", 3), 96)
    settle(driver, "a", 96)
    driver.arrive("b", 100, keys_of("a", 3))
    driver.lookup("b", 0, 100)
    driver.allocate("b", table(7, first_block=50, first_kept=3), 96)
    assert not driver.all_of(e.LoadIssued)
    (broken,) = driver.all_of(e.InvariantViolated)
    assert broken.rule == "LOADABLE_AFTER_COMMIT"


def test_copies_out_of_a_window_do_not_outlast_their_step() -> None:
    """Its pages are freed without a word, so asynchronous saves are for models that keep everything."""
    driver = driver_of(async_saves=True)
    start(driver, "a", keys_of("a", 3), 96)
    settle(driver, "a", 96)
    assert [save.is_async for save in driver.all_of(e.SaveIssued)] == [False]


@pytest.mark.parametrize("windows", [(), (32,), (16, 32), (0, -1)])
def test_windows_that_cannot_be_served_are_refused(windows: tuple[int, ...]) -> None:
    """Without a group that sees everything there is no prefix to count chunks along."""
    with pytest.raises(ConfigurationError, match="windows is"):
        LedgerConfiguration(block_size=16, chunk_size=32, num_slots=64, windows=windows)


def test_a_pool_must_hold_a_chunk_of_every_group() -> None:
    """Two blocks in two groups are four pages."""
    assert LedgerConfiguration(block_size=16, chunk_size=32, num_slots=4, windows=WINDOWS).pages_per_chunk == 4
    with pytest.raises(ConfigurationError, match="has 3 slots"):
        LedgerConfiguration(block_size=16, chunk_size=32, num_slots=3, windows=WINDOWS)
