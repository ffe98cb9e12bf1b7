"""What the ledger decides: answers, loads, saves, failures. Driven through `Ledger.observe`, read from its events."""

# ruff: noqa: ARG002, D102 -- a handler's method has the signature and the meaning of its base

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from lifecycle_driver import Driver, keys_of
from lifecycle_driver.invariants import num_entries

from kvledger.lifecycle import Core, CoreError, RequestState, StateHandler
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.handlers import Finished, New, Running
from kvledger.lifecycle.turn import Turn


def kinds(decisions: Sequence[e.Event]) -> list[str]:
    """The ids of the decisions."""
    return [decision.id for decision in decisions]


def violations(driver: Driver) -> list[str]:
    """Names of the rules broken so far."""
    return [event.rule for event in driver.all_of(e.InvariantViolated)]


# --- lookups -------------------------------------------------------------------------------------


def seed_driver(num_saved_tokens: int) -> Driver:
    """The seed's figures: chunks of 256 on blocks of 16; 336 tokens computed; then preempted."""
    driver = Driver(chunk_size=256, block_size=16, num_slots=64, save_tails=False)
    driver.save_prefix("earlier", keys_of("seed", num_saved_tokens // 256))
    driver.start("a", keys_of("seed", 2), 600, range(38))
    driver.preempt("a", 336)
    driver.settle_all()
    return driver


def test_every_poll_of_the_seeds_request_is_answered_with_nothing() -> None:
    """256 tokens are saved and 336 computed: -80 are to be loaded, which is 0, at the first poll and the tenth."""
    driver = seed_driver(256)
    assert [driver.lookup("a", 336, 600).num_external_tokens for _ in range(10)] == [0] * 10
    assert driver.all_of(e.LookupAnswered)[-1].num_hit_tokens == 256


def test_a_longer_hit_than_what_is_computed_is_answered_with_the_difference() -> None:
    """512 tokens are saved and 336 computed: 176 remain to be loaded, at every poll."""
    driver = seed_driver(512)
    assert [driver.lookup("a", 336, 600).num_external_tokens for _ in range(3)] == [176] * 3


def test_each_poll_is_answered_for_the_local_hit_of_that_very_poll() -> None:
    """The local hit of a waiting request shrinks while others run; what is cached is the hit, not the answer."""
    driver = seed_driver(512)
    assert [driver.lookup("a", local, 600).num_external_tokens for local in (96, 64, 32, 0)] == [416, 448, 480, 512]


def test_an_unaligned_local_hit_is_answered_with_nothing() -> None:
    """Whole pages are loaded, so a load must start on a block boundary."""
    driver = seed_driver(512)
    assert driver.lookup("a", 337, 600).num_external_tokens == 0


@pytest.mark.parametrize(("chunk_size", "block_size"), [(8, 16), (16, 16), (32, 16)])
def test_a_full_hit_leaves_the_last_token_to_compute(chunk_size: int, block_size: int) -> None:
    """At an exact multiple of the chunk the whole prompt is there; the engine still needs one token to run."""
    driver = Driver(chunk_size=chunk_size, block_size=block_size)
    driver.save_prefix("earlier", keys_of("d", 64 // chunk_size))
    driver.arrive("a", 64, keys_of("d", 64 // chunk_size))
    assert driver.lookup("a", 0, 64).num_external_tokens == 63
    assert driver.lookup("a", 48, 64).num_external_tokens == 15


def test_a_fully_computed_request_is_answered_with_nothing() -> None:
    """Nothing is left once everything but the last token is local."""
    driver = Driver()
    driver.save_prefix("earlier", keys_of("d", 8))
    driver.arrive("a", 64, keys_of("d", 8))
    assert driver.lookup("a", 64, 64).num_external_tokens == 0


def test_the_hit_of_a_preempted_request_covers_its_output() -> None:
    """Prompt and output tokens alike are looked up on the way back."""
    driver = Driver()
    driver.start("a", keys_of("a", 2), 20, (1, 2))
    driver.step(("a", 20, 1, 21))
    driver.keys("a", 2, keys_of("a", 2, 2))
    driver.preempt("a", 32)
    driver.settle_all()
    assert driver.lookup("a", 0, 33).num_external_tokens == 32


def test_any_number_of_lookups_equals_one() -> None:
    """Everything that is believed is the same, except the sequence of the pending answer."""

    def believed_after(num_lookups: int) -> dict[str, bytes]:
        driver = seed_driver(512)
        for _ in range(num_lookups):
            driver.lookup("a", 336, 600)
        record = driver.record("a")
        record.answer, record.answered_at = msgspec.structs.replace(record.answer, cause=0), 0
        driver.projections.tracker.state.time_ns = 0
        return driver.projections.snapshot()

    assert believed_after(1) == believed_after(2) == believed_after(17)


@pytest.mark.parametrize("event", ["saving", "evicted", "tainted", "reset", "missing", "complete"])
def test_an_answer_says_why_the_hit_ends(event: str) -> None:
    """How a chunk left that is missing, the reader of the log knows."""
    driver = Driver(num_slots=4)
    keys = keys_of("d", 4)
    if event != "missing":
        driver.save_prefix("earlier", keys)
    if event == "saving":
        driver = Driver()
        driver.start("other", keys, 33, (1, 2, 3))
        driver.preempt("other", 32)
    elif event == "evicted":
        driver.save_prefix("greedy", keys_of("greedy", 8))
    elif event == "tainted":
        driver.arrive("failing", 33, keys)
        driver.lookup("failing", 0, 33)
        driver.allocate("failing", (1, 2, 3), 32)
        driver.report(driver.all_of(e.LoadIssued)[-1].job_id, ok=False)
    elif event == "reset":
        driver.reset()
    driver.arrive("a", 33, keys)
    answer = driver.lookup("a", 0, 33)
    assert answer.miss_reason == ("missing" if event in {"evicted", "tainted", "reset"} else event)


# --- allocations and loads -----------------------------------------------------------------------


def with_hit(num_chunks: int = 4, **configuration: Any) -> Driver:
    """A new request `a` whose first `num_chunks` chunks are saved; 8 tokens a chunk on blocks of 16."""
    driver = Driver(**configuration)
    keys = keys_of("d", num_chunks)
    driver.save_prefix("earlier", keys)
    driver.arrive("a", num_chunks * 8 + 8, keys)
    return driver


def test_the_load_copies_the_pages_of_the_answered_tokens_into_the_given_blocks() -> None:
    """One slot and one block per page, from the first block beyond the local hit on."""
    driver = with_hit()
    assert driver.lookup("a", 16, 40).num_external_tokens == 16
    (load,) = driver.allocate("a", (7, 8, 9), 16)
    assert isinstance(load, e.LoadIssued)
    assert (load.first_token, load.num_tokens, load.block_ids) == (16, 16, (8,))
    assert load.slots == driver.projections.pool.get(keys_of("d", 4)[3])


def test_a_part_of_the_answer_is_loaded_when_only_a_part_is_taken_up() -> None:
    """`num_external_tokens` is the scheduler's word; it may be less than was answered."""
    driver = with_hit()
    driver.lookup("a", 0, 40)
    (load,) = driver.allocate("a", (7, 8, 9), 16)
    assert isinstance(load, e.LoadIssued)
    assert (load.num_tokens, load.block_ids) == (16, (7,))
    assert driver.all_of(e.InvariantViolated) == []


def test_nothing_is_loaded_when_nothing_is_taken_up() -> None:
    """Another connector won, or no lookup was wanted; the promise is released, the request is in good standing."""
    driver = with_hit()
    driver.lookup("a", 0, 40)
    assert driver.allocate("a", (7, 8, 9), 0) == []
    assert driver.record("a").answer is None
    assert driver.projections.pool.promised == {}
    assert driver.record("a").trust == "trusted"


@pytest.mark.parametrize("taken_up", [33, 40, 1000])
def test_more_than_was_answered_is_refused_and_quarantined(taken_up: int) -> None:
    """There is nothing to load it from; the violation names both numbers."""
    driver = with_hit()
    driver.lookup("a", 0, 40)
    decisions = driver.allocate("a", range(100), taken_up)
    assert kinds(decisions) == ["invariant.violated", "request.quarantined"]
    assert isinstance(decisions[0], e.InvariantViolated)
    assert decisions[0].rule == "ALLOC_MATCHES_LOOKUP"
    assert str(taken_up) in decisions[0].detail
    assert "32 had been offered" in decisions[0].detail


def test_an_allocation_without_a_lookup_is_fine_as_long_as_it_takes_up_nothing() -> None:
    """Not every allocation follows a lookup."""
    driver = with_hit()
    assert driver.allocate("a", (1, 2, 3), 0) == []


def test_tokens_that_no_lookup_answered_are_refused() -> None:
    """Also when an answer had been taken up before: it is used once."""
    driver = with_hit()
    driver.lookup("a", 0, 40)
    driver.allocate("a", (1, 2, 3), 0)
    driver.allocate("a", (1, 2, 3), 32)
    assert violations(driver) == ["ALLOC_MATCHES_LOOKUP"]
    assert driver.all_of(e.LoadIssued) == []


def test_an_answer_of_an_earlier_generation_is_not_taken_up() -> None:
    """A preemption between lookup and allocation voids the answer."""
    driver = with_hit()
    driver.lookup("a", 0, 40)
    driver.preempt("a", 0)
    driver.allocate("a", (1, 2, 3), 32)
    assert violations(driver) == ["ALLOC_MATCHES_LOOKUP"]


def test_tokens_taken_up_in_the_middle_of_a_prefill_are_refused() -> None:
    """No lookup can have answered them, and nobody would load them: the request would read what was never written."""
    driver = with_hit()
    driver.lookup("a", 0, 40)
    driver.allocate("a", (1, 2, 3), 0)
    driver.step(("a", 0, 16, 40))
    assert driver.state("a") is RequestState.CHUNKED_PREFILL
    driver.allocate("a", (1, 2, 3), 16)
    assert violations(driver) == ["ALLOC_MATCHES_LOOKUP"]
    assert driver.record("a").trust == "quarantined"


def test_a_table_too_short_for_the_load_is_refused() -> None:
    """The violation names how many blocks are needed and how many were given."""
    driver = with_hit()
    driver.lookup("a", 0, 40)
    driver.allocate("a", (1,), 32)
    assert violations(driver) == ["TABLE_EQ"]
    assert "need 2 blocks, but 1 were given" in driver.all_of(e.InvariantViolated)[0].detail


def test_a_load_of_what_is_not_stored_any_more_is_refused() -> None:
    """A promised chunk is not evicted, but another request's failed load taints it."""
    driver = with_hit()
    driver.lookup("a", 0, 40)
    driver.arrive("b", 40, keys_of("d", 4))
    driver.lookup("b", 0, 40)
    (load,) = driver.allocate("b", (4, 5, 6), 32)
    assert isinstance(load, e.LoadIssued)
    driver.report(load.job_id, ok=False)
    assert kinds(driver.allocate("a", (1, 2, 3), 32)) == ["invariant.violated", "request.quarantined"]
    assert violations(driver) == ["LOADABLE_AFTER_COMMIT"]
    assert "tokens up to 32 were promised" in driver.all_of(e.InvariantViolated)[0].detail


def test_a_promised_chunk_is_not_evicted_before_the_allocation() -> None:
    """Between lookup and allocation another request's save needs room and does not get this one."""
    driver = with_hit(num_slots=2)
    driver.lookup("a", 0, 40)
    driver.start("greedy", keys_of("greedy", 2), 17, (20, 21))
    decisions = driver.finish("greedy", 16, 18)
    assert kinds(decisions) == ["save.declined", "request.released"]
    assert kinds(driver.allocate("a", (1, 2, 3), 32)) == ["load.issued"]


def test_a_chunk_that_is_being_loaded_is_not_evicted() -> None:
    """A load in flight reads its slots until it is reported."""
    driver = with_hit(num_slots=2)
    driver.lookup("a", 0, 40)
    driver.allocate("a", (1, 2, 3), 32)
    driver.start("greedy", keys_of("greedy", 2), 17, (20, 21))
    assert "save.declined" in kinds(driver.finish("greedy", 16, 18))
    driver.report(driver.all_of(e.LoadIssued)[-1].job_id)
    driver.start("greedier", keys_of("greedier", 2), 17, (20, 21))
    assert "save.issued" in kinds(driver.finish("greedier", 16, 18))


# --- saves ---------------------------------------------------------------------------------------


def test_settled_chunks_are_saved_from_the_blocks_that_hold_them() -> None:
    """Only whole settled chunks, each page once."""
    driver = Driver(chunk_size=16)
    driver.start("a", keys_of("a", 3), 50, (5, 6, 7, 8))
    decisions = driver.step(("a", 50, 1, 51), settled=[("a", 0, 47)])
    assert kinds(decisions) == ["save.issued"]
    (save,) = driver.all_of(e.SaveIssued)
    assert (save.chunks, save.block_ids, save.before_forward) == ((0, 1), (5, 6), False)


def test_a_chunk_is_saved_once() -> None:
    """Not again while its save is in flight, not again when it is there, whoever has it."""
    driver = Driver(chunk_size=16)
    keys = keys_of("shared", 2)
    driver.start("a", keys, 33, (1, 2, 3))
    driver.start("b", keys, 33, (1, 2, 4))
    assert kinds(driver.step(settled=[("a", 0, 32)])) == ["save.issued"]
    assert driver.step(settled=[("b", 0, 32)]) == []
    driver.settle_all()
    assert kinds(driver.finish("a", 33, 34)) == ["request.released"]


def test_a_chunk_without_a_key_is_not_saved() -> None:
    """Under asynchronous scheduling a key may be known later than its tokens are settled."""
    driver = Driver(chunk_size=16)
    driver.start("a", keys_of("a", 1), 33, (1, 2, 3))
    driver.step(settled=[("a", 0, 32)])
    assert driver.all_of(e.SaveIssued)[0].chunks == (0,)


def test_what_a_preempted_request_loses_is_saved_before_the_forward() -> None:
    """Its blocks are free already: the next forward may overwrite them."""
    driver = Driver(chunk_size=16)
    driver.start("a", keys_of("a", 3), 50, (5, 6, 7, 8))
    (save,) = driver.preempt("a", 48)
    assert isinstance(save, e.SaveIssued)
    assert save.before_forward
    assert (save.chunks, save.block_ids, save.generation) == ((0, 1, 2), (5, 6, 7), 0)
    assert driver.record("a").generation == 1


def test_what_a_finished_request_leaves_is_saved_before_the_forward() -> None:
    """And the request stays until that save is settled."""
    driver = Driver(chunk_size=16)
    driver.start("a", keys_of("a", 3), 48, (5, 6, 7))
    (save,) = driver.finish("a", 48, 49)
    assert isinstance(save, e.SaveIssued)
    assert save.before_forward
    assert driver.state("a") is RequestState.FINISHED
    assert kinds(driver.report(save.job_id)) == ["save.completed", "request.released"]
    assert driver.state("a") is None


def test_the_last_sampled_token_is_never_saved() -> None:
    """A request that ends exactly on a chunk boundary: the last token's place was never written."""
    driver = Driver(chunk_size=16)
    driver.start("a", keys_of("a", 2), 31, (1, 2))
    driver.finish("a", 32, 32)
    assert driver.all_of(e.SaveIssued)[0].chunks == (0,)


def test_nothing_is_saved_while_a_load_is_in_flight() -> None:
    """What is computed on top of a load that may fail may be wrong too."""
    driver = with_hit()
    driver.keys("a", 4, keys_of("d", 1, 4))
    driver.lookup("a", 0, 40)
    driver.allocate("a", (1, 2, 3), 32)
    assert driver.step(("a", 32, 8, 40)) == []
    assert driver.step(settled=[("a", 0, 40)]) == []
    assert driver.preempt("a", 40) == []
    assert len(driver.all_of(e.SaveIssued)) == 1, "only the one of the earlier request"


def test_a_chunk_that_settled_during_a_load_is_saved_afterwards() -> None:
    """The cursor does not pass it by."""
    driver = with_hit()
    driver.keys("a", 4, keys_of("d", 1, 4))
    driver.lookup("a", 0, 40)
    driver.allocate("a", (1, 2, 3), 32)
    driver.step(("a", 32, 8, 40))
    driver.step(settled=[("a", 0, 40)])
    driver.report(driver.all_of(e.LoadIssued)[-1].job_id)
    assert driver.record("a").num_chunks_handled == 0
    driver.step(settled=[("a", 0, 40)])
    assert driver.all_of(e.SaveIssued)[-1].chunks == (4,)


def test_a_full_pool_declines_and_says_so() -> None:
    """What fits is saved, beginning with the first chunk; the rest is declined with a reason."""
    driver = Driver(chunk_size=16, num_slots=2)
    driver.start("a", keys_of("a", 4), 65, (1, 2, 3, 4, 5))
    decisions = driver.step(settled=[("a", 0, 64)])
    assert kinds(decisions) == ["save.issued", "save.declined"]
    declined = decisions[1]
    assert isinstance(declined, e.SaveDeclined)
    assert (declined.first_chunk, declined.num_chunks, declined.reason) == (2, 2, "pool_full")


def test_room_is_made_by_evicting_what_nobody_needs() -> None:
    """The oldest idle chunks leave, and the event names for whom."""
    driver = Driver(chunk_size=16, num_slots=3)
    driver.save_prefix("old", keys_of("old", 3))
    driver.start("a", keys_of("a", 2), 33, (1, 2, 3))
    decisions = driver.step(settled=[("a", 0, 32)])
    assert kinds(decisions) == ["chunks.evicted", "save.issued"]
    evicted = [key for event in driver.all_of(e.ChunksEvicted) for key in event.keys]
    assert evicted == [keys_of("old", 3)[2], keys_of("old", 3)[1]], "the end of a prefix leaves before its beginning"
    assert {event.request_id for event in driver.all_of(e.ChunksEvicted)} == {"a"}


def test_a_prefix_is_never_evicted_for_its_own_tail() -> None:
    """Without its beginning the tail is worth nothing."""
    driver = Driver(chunk_size=16, num_slots=2)
    driver.start("a", keys_of("a", 4), 65, (1, 2, 3, 4, 5))
    driver.step(settled=[("a", 0, 32)])
    driver.settle_all()
    assert kinds(driver.step(settled=[("a", 2, 64)])) == ["save.declined"]
    assert driver.all_of(e.ChunksEvicted) == []


def test_nothing_is_evicted_for_a_save_that_cannot_happen_anyway() -> None:
    """Four chunks share the only page and two of them are promised: evicting the others would free nothing."""
    driver = Driver(chunk_size=4, block_size=16, num_slots=1)
    driver.save_prefix("earlier", keys_of("d", 4))
    driver.arrive("a", 9, keys_of("d", 2))
    assert driver.lookup("a", 0, 9).num_external_tokens == 8
    driver.start("b", keys_of("b", 4), 17, (1, 2))
    driver.step(settled=[("b", 0, 16)])
    assert driver.all_of(e.SaveIssued)[1:] == []
    assert driver.all_of(e.ChunksEvicted) == []


def test_a_settled_chunk_beyond_the_table_is_a_violation() -> None:
    """The table and the token count cannot both be right; the request gets no more help."""
    driver = Driver(chunk_size=16)
    driver.start("a", keys_of("a", 4), 65, (1, 2))
    driver.step(settled=[("a", 0, 64)])
    assert violations(driver) == ["TABLE_EQ"]
    assert driver.record("a").trust == "quarantined"
    assert driver.all_of(e.SaveIssued) == []


# --- failures ------------------------------------------------------------------------------------


def test_a_failed_load_taints_its_chunks_and_they_are_not_offered_again() -> None:
    """Otherwise recomputing, looking up and failing would go on for ever."""
    driver = with_hit()
    driver.lookup("a", 0, 40)
    (load,) = driver.allocate("a", (1, 2, 3), 32)
    assert isinstance(load, e.LoadIssued)
    decisions = driver.report(load.job_id, ok=False, error="disk on fire")
    assert kinds(decisions) == ["load.failed", "chunks.tainted"]
    driver.roll_back("a", 0)
    assert driver.lookup("a", 0, 40).num_external_tokens == 0
    driver.arrive("b", 40, keys_of("d", 4))
    answer = driver.lookup("b", 0, 40)
    assert (answer.num_external_tokens, answer.miss_reason) == (0, "missing")


def test_a_tainted_chunk_is_offered_again_once_it_is_saved_anew() -> None:
    """The taint sits on the copy, not on the key."""
    driver = with_hit()
    driver.lookup("a", 0, 40)
    (load,) = driver.allocate("a", (1, 2, 3), 32)
    assert isinstance(load, e.LoadIssued)
    driver.report(load.job_id, ok=False)
    driver.roll_back("a", 0)
    driver.step(("a", 0, 40, 40))
    driver.step(settled=[("a", 0, 40)])
    driver.settle_all()
    driver.arrive("b", 40, keys_of("d", 4))
    assert driver.lookup("b", 0, 40).num_external_tokens == 32


def test_one_failed_rank_fails_a_load_for_all_but_only_when_every_rank_has_reported() -> None:
    """Failed is not the same as quiet: another rank may still be writing."""
    driver = with_hit(num_ranks=2)
    driver.lookup("a", 0, 40)
    (load,) = driver.allocate("a", (1, 2, 3), 32)
    assert isinstance(load, e.LoadIssued)
    assert driver.report(load.job_id, ranks=(1,), ok=False) == []
    assert kinds(driver.report(load.job_id, ranks=(0,)))[0] == "load.failed"


def test_a_save_counts_when_every_rank_has_saved() -> None:
    """One rank of two is not enough to be offered."""
    driver = Driver(num_ranks=2)
    driver.start("a", keys_of("a", 2), 17, (1, 2))
    (save,) = driver.preempt("a", 16)
    assert isinstance(save, e.SaveIssued)
    assert driver.report(save.job_id, ranks=(1,)) == []
    assert driver.lookup("a", 0, 17).num_external_tokens == 0
    assert kinds(driver.report(save.job_id, ranks=(0,))) == ["save.completed"]
    assert driver.lookup("a", 0, 17).num_external_tokens == 16


def test_a_failed_save_frees_its_slots_and_offers_nothing() -> None:
    """The pool is as large as before."""
    driver = Driver(num_slots=4)
    driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    (save,) = driver.preempt("a", 32)
    assert isinstance(save, e.SaveIssued)
    assert driver.projections.slots.num_free == 2
    assert kinds(driver.report(save.job_id, ok=False)) == ["save.failed"]
    assert driver.projections.slots.num_free == 4
    assert driver.lookup("a", 0, 33).num_external_tokens == 0


def test_a_job_that_nobody_reports_is_given_up() -> None:
    """After `max_silent_steps` it is asked after, after as many more it counts as failed: nothing waits for ever."""
    driver = Driver(max_silent_steps=3)
    driver.start("a", keys_of("a", 2), 17, (1, 2))
    driver.finish("a", 16, 18)
    decisions = [driver.step() for _ in range(8)]
    assert [kinds(of_step) for of_step in decisions[:4]] == [[], [], [], ["transfer.awaited"]]
    assert [kinds(of_step) for of_step in decisions[4:7]] == [[], [], []]
    assert kinds(decisions[7]) == ["invariant.violated", "save.failed", "request.released"]
    assert violations(driver) == ["LIVENESS"]
    assert len(driver.projections.jobs) == 0


def test_a_load_that_nobody_reports_taints_its_chunks_too() -> None:
    """A given-up load is a failed load: offering the same chunks again would be given up again."""
    driver = with_hit(max_silent_steps=3)
    driver.lookup("a", 0, 40)
    driver.allocate("a", (1, 2, 3), 32)
    decisions = [decision for _ in range(8) for decision in driver.step()]
    assert "load.failed" in kinds(decisions)
    driver.roll_back("a", 0)
    assert driver.lookup("a", 0, 40).num_external_tokens == 0


def test_the_slots_of_a_given_up_save_are_not_written_by_another_while_it_may_still_write() -> None:
    """Given up is not quiet: when the slow copy lands at last, the slot must not hold another request's chunk."""
    driver = Driver(chunk_size=16, num_slots=1, max_silent_steps=3)
    driver.start("slow", keys_of("slow", 1), 17, (1, 2))
    (slow,) = driver.preempt("slow", 16)
    assert isinstance(slow, e.SaveIssued)
    for _ in range(8):
        driver.step()
    assert len(driver.all_of(e.SaveFailed)) == 1
    driver.start("next", keys_of("next", 1), 17, (3, 4))
    driver.preempt("next", 16)
    unsettled = [save for save in driver.all_of(e.SaveIssued) if save.slots == slow.slots]
    assert unsettled == [slow], "nobody has said that the first copy will not write there any more"


def given_up() -> tuple[Driver, int]:
    """A save of two ranks that neither has reported, given up."""
    driver = Driver(num_ranks=2, max_silent_steps=3)
    driver.start("a", keys_of("a", 2), 17, (1, 2))
    (save,) = driver.preempt("a", 16)
    assert isinstance(save, e.SaveIssued)
    for _ in range(8):
        driver.step()
    assert violations(driver) == ["LIVENESS"]
    return driver, save.job_id


def audited(driver: Driver) -> list[str]:
    """Rules that the audit of the driver's log names apart from what was recorded."""
    driver.ledger.commit()
    audit = Audit(Core.standard(), driver.configuration)
    audit.run(driver.sink.events())
    assert audit.num_events
    return [broken.rule for broken in audit.violations if broken.rule != "RECORDED"]


def test_the_late_word_of_each_rank_about_a_save_that_was_given_up_breaks_nothing() -> None:
    """It is what the slots of the save were waiting for; whether it succeeded matters to nobody any more."""
    driver, job_id = given_up()
    for rank, ok in ((1, False), (0, True)):
        assert driver.report(job_id, ranks=(rank,), ok=ok) == []
    assert not driver.projections.jobs.given_up
    assert driver.projections.slots.num_free == driver.configuration.num_slots
    assert audited(driver) == []


@pytest.mark.parametrize("late", [((0,), (0,)), ((0, 1), (1,)), ((0,), (1,), (0,)), ((0, 2),)])
def test_what_a_rank_says_twice_about_a_save_that_was_given_up_is_named(late: tuple[tuple[int, ...], ...]) -> None:
    """Also once nobody owes a word; and so is a rank that there is not."""
    driver, job_id = given_up()
    *first, last = late
    for ranks in first:
        assert driver.report(job_id, ranks=ranks) == []
    assert kinds(driver.report(job_id, ranks=last)) == ["invariant.violated"]
    assert violations(driver) == ["LIVENESS", "COMPLETION_ONCE"]
    assert audited(driver) == ["COMPLETION_ONCE"]


@pytest.mark.parametrize(
    ("reports", "why"),
    [
        ([(0, 2)], "by ranks [2], which do not exist"),
        ([(0,), (0,)], "by ranks [0], which had already reported it"),
        ([(0, 1), (1,)], "but it was already settled"),
    ],
)
def test_a_report_that_cannot_be_right_says_why(reports: list[tuple[int, ...]], why: str) -> None:
    """Two ranks save; each reports once."""
    driver = Driver(num_ranks=2)
    driver.start("a", keys_of("a", 2), 17, (1, 2))
    (save,) = driver.preempt("a", 16)
    assert isinstance(save, e.SaveIssued)
    for ranks in reports:
        driver.report(save.job_id, ranks=ranks)
    (broken,) = driver.all_of(e.InvariantViolated)
    assert broken.detail == f"job {save.job_id} was reported{'' if why.startswith('by') else ','} {why}"


def test_a_report_about_a_job_that_was_never_issued_says_so() -> None:
    """Its number is larger than that of the last job."""
    driver = Driver()
    driver.report(7)
    assert driver.all_of(e.InvariantViolated)[0].detail == "job 7 was reported, but no such job was ever issued"


def test_a_save_is_offered_only_if_the_load_under_it_has_arrived() -> None:
    """Both are made in one step. The save is reported first, and the load may still fail."""
    driver = with_hit()
    driver.keys("a", 4, keys_of("d", 1, 4))
    driver.lookup("a", 0, 40)
    driver.allocate("a", (1, 2, 3), 32)
    driver.step(("a", 32, 8, 40))
    (save,) = driver.finish("a", 40, 41)
    assert isinstance(save, e.SaveIssued)
    (failed,) = driver.report(save.job_id)
    assert isinstance(failed, e.SaveFailed)
    assert (failed.error, failed.quiet) == ("the blocks that the save read may have held wrong contents", True)


@pytest.mark.parametrize("job_id", [0, 7, 2**40])
def test_a_report_of_a_foreign_job_is_recorded_and_harmless(job_id: int) -> None:
    """Nothing changes but the time."""
    driver = with_hit()
    before = driver.projections.snapshot()
    time_ns = driver.projections.tracker.time_ns
    assert kinds(driver.report(job_id)) == ["invariant.violated"]
    driver.projections.tracker.state.time_ns = time_ns
    after = driver.projections.snapshot()
    assert violations(driver) == ["COMPLETION_ONCE"]
    assert after == before


def test_a_doubled_report_frees_nothing_twice() -> None:
    """The second one is none of ours."""
    driver = Driver()
    driver.start("a", keys_of("a", 2), 17, (1, 2))
    (save,) = driver.preempt("a", 16)
    assert isinstance(save, e.SaveIssued)
    driver.report(save.job_id)
    free = driver.projections.slots.num_free
    driver.report(save.job_id)
    assert violations(driver) == ["COMPLETION_ONCE"]
    assert driver.projections.slots.num_free == free
    assert driver.record("a").trust == "trusted"


def test_a_late_report_reaches_the_job_and_not_the_requests_new_life() -> None:
    """A save of generation 0 completes in generation 1 and moves nothing but its chunks."""
    driver = Driver()
    driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    (save,) = driver.preempt("a", 32)
    assert isinstance(save, e.SaveIssued)
    driver.lookup("a", 0, 33)
    driver.allocate("a", (4, 5, 6))
    assert driver.state("a") is RequestState.RECOVERING
    driver.report(save.job_id)
    assert driver.state("a") is RequestState.RECOVERING
    assert driver.record("a").generation == 1


# --- reset ---------------------------------------------------------------------------------------


def test_a_reset_makes_everything_unavailable() -> None:
    """After new weights no old chunk is offered, and every slot is free."""
    driver = with_hit()
    driver.reset()
    answer = driver.lookup("a", 0, 40)
    assert (answer.num_external_tokens, answer.miss_reason) == (0, "missing")
    assert driver.projections.slots.num_free == 32


def test_two_resets_equal_one() -> None:
    """Except for the epoch's number."""

    def believed_after(num_resets: int) -> dict[str, bytes]:
        driver = with_hit()
        for _ in range(num_resets):
            driver.reset()
        driver.projections.jobs.state.epoch = driver.projections.tracker.state.time_ns = 0
        return dict(driver.projections.snapshot())

    assert believed_after(1) == believed_after(2)


def test_a_save_that_completes_after_a_reset_offers_nothing() -> None:
    """Its bytes were made with the old weights; its slots are free again."""
    driver = Driver()
    driver.start("a", keys_of("a", 2), 17, (1, 2))
    (save,) = driver.preempt("a", 16)
    assert isinstance(save, e.SaveIssued)
    driver.reset()
    driver.report(save.job_id)
    assert driver.lookup("a", 0, 17).num_external_tokens == 0
    assert driver.projections.slots.num_free == 32


def test_what_was_computed_before_a_reset_is_not_saved_after_it() -> None:
    """It was made with the old weights; only the next generation computes with the new ones."""
    driver = Driver(chunk_size=16)
    driver.start("a", keys_of("a", 1), 17, (1, 2))
    driver.reset()
    assert driver.step(settled=[("a", 0, 16)]) == []
    assert driver.preempt("a", 16) == []


def test_the_next_turn_on_top_of_what_was_computed_before_a_reset_is_not_saved() -> None:
    """A streaming session keeps its blocks; who computes the same tokens with the new weights must not find these."""
    driver = Driver(chunk_size=16)
    driver.start("a", keys_of("a", 2), 33, (1, 2, 3))
    driver.reset()
    driver.continue_session("a", 33, 49)
    driver.keys("a", 2, keys_of("a", 1, 2))
    assert kinds(driver.step(("a", 33, 16, 49), settled=[("a", 0, 48)])) == ["prefill.completed"]
    assert driver.preempt("a", 48) == []


def test_what_was_loaded_before_a_reset_is_not_saved_after_it() -> None:
    """The load brings pages of the old weights, and what is computed on top of them is as old."""
    driver = with_hit()
    driver.keys("a", 4, keys_of("d", 1, 4))
    driver.lookup("a", 0, 40)
    driver.allocate("a", (1, 2, 3), 32)
    driver.reset()
    driver.step(("a", 32, 8, 40))
    driver.settle_all()
    assert driver.step(settled=[("a", 0, 40)]) == []


def test_a_chunk_whose_save_a_reset_made_stale_is_saved_anew() -> None:
    """The old save is still in flight and will offer nothing, so it is no reason to skip the chunk."""
    driver = Driver(chunk_size=16)
    driver.start("a", keys_of("a", 1), 17, (1, 2))
    driver.step(settled=[("a", 0, 16)])
    driver.reset()
    driver.preempt("a", 16)
    driver.lookup("a", 0, 17)
    driver.allocate("a", (3, 4))
    driver.step(("a", 0, 17, 17))
    assert kinds(driver.step(settled=[("a", 0, 16)])) == ["save.issued"]


def test_a_load_that_completes_after_a_reset_is_settled() -> None:
    """The request goes on; no slot stays behind."""
    driver = with_hit()
    driver.lookup("a", 0, 40)
    driver.allocate("a", (1, 2, 3), 32)
    driver.reset()
    driver.step(("a", 32, 8, 40))
    assert kinds(driver.settle_all()) == ["load.completed", "prefill.completed"]
    assert driver.projections.slots.num_free == 32


# --- ids used again ------------------------------------------------------------------------------


def test_an_id_used_again_begins_a_new_life() -> None:
    """The save of the first life settles without touching the second."""
    driver = Driver()
    driver.start("a", keys_of("first", 2), 17, (1, 2))
    (save,) = driver.finish("a", 16, 18)
    assert isinstance(save, e.SaveIssued)
    assert driver.arrive("a", 17, keys_of("second", 2)) == []
    assert kinds(driver.report(save.job_id)) == ["save.completed"]
    assert driver.state("a") is RequestState.NEW
    assert driver.lookup("a", 0, 17).num_external_tokens == 0
    driver.arrive("b", 17, keys_of("first", 2))
    assert driver.lookup("b", 0, 17).num_external_tokens == 16


def test_an_id_that_arrives_while_it_still_lives_is_a_violation() -> None:
    """Ids are identity; the log says so, and serving goes on."""
    driver = Driver()
    driver.arrive("a", 17)
    assert kinds(driver.arrive("a", 20)) == ["invariant.violated"]
    assert violations(driver) == ["LEGAL_TRANSITION"]


@pytest.mark.parametrize("event", [
    e.LookupRequested("ghost", 0, 5, 1),
    e.BlocksAllocated("ghost", (1,), 0, 1),
    e.RequestPreempted("ghost", 5, 5, 1),
    e.RequestFinished("ghost", "FINISHED_ABORTED", 0, 5, 1),
    e.ChunkKeysObserved("ghost", 0, (b"key",)),
    e.TokensRolledBack("ghost", 0, 1),
    e.SessionContinued("ghost", 0, 5, 5, 1),
], ids=lambda event: event.id)  # fmt: skip
def test_an_event_of_an_unknown_request_is_recorded_and_leaves_nothing_behind(event: e.Event) -> None:
    """One violation, no entry anywhere."""
    driver = Driver()
    assert kinds(driver.observe(event)) == ["invariant.violated"]
    assert not any(num_entries(driver.projections).values())


# --- sessions ------------------------------------------------------------------------------------


def test_a_session_whose_keys_change_mid_block_does_not_poison_the_earlier_chunk() -> None:
    """Chunks of 8 on blocks of 16: turn one fills a block, turn two keeps its first half and rewrites the second.

    The page image with turn two's half must be offered under turn two's key only, while the first half's key
    may point at either image and turn one's second half must keep turn one's.
    """
    driver = Driver(chunk_size=8, block_size=16)
    first, second = keys_of("turn one", 2), (keys_of("turn one", 1)[0], keys_of("turn two", 2)[1])
    driver.start("a", first, 16, (1,))
    driver.step(("a", 16, 1, 17), extended=[("a", (2,))], settled=[("a", 0, 16)])
    driver.settle_all()
    (page_one,) = driver.projections.pool.get(first[1])
    driver.continue_session("a", 8, 20)
    driver.keys("a", 1, second[1:])
    driver.step(("a", 8, 12, 20))
    driver.step(settled=[("a", 1, 20)])
    driver.settle_all()
    (page_two,) = driver.projections.pool.get(second[1])
    assert page_one != page_two
    assert driver.projections.pool.get(first[1]) == (page_one,)
    driver.arrive("b", 17, first)
    driver.lookup("b", 0, 17)
    (load,) = driver.allocate("b", (7, 8), 16)
    assert isinstance(load, e.LoadIssued)
    assert load.slots == (page_one,)


def test_a_save_in_flight_keeps_the_keys_it_was_issued_for() -> None:
    """Keys replaced before it is reported do not rename what is in its pages."""
    driver = Driver(chunk_size=8, block_size=16)
    first = keys_of("turn one", 2)
    driver.start("a", first, 16, (1,))
    driver.step(("a", 16, 1, 17), extended=[("a", (2,))], settled=[("a", 0, 16)])
    driver.continue_session("a", 0, 20)
    replaced = keys_of("turn two", 2)
    driver.keys("a", 0, replaced)
    driver.settle_all()
    assert [driver.projections.pool.get(key) is not None for key in (*first, *replaced)] == [True, True, False, False]


def test_a_shorter_image_of_a_block_is_replaced_under_the_right_key_only() -> None:
    """Chunk 0's page is replaced by the image that chunk 1's save makes, also when chunk 1 has another key then."""
    driver = Driver(chunk_size=8, block_size=16)
    driver.start("a", keys_of("one", 1), 9, (1,))
    driver.step(("a", 9, 1, 10), settled=[("a", 0, 9)])
    driver.settle_all()
    driver.continue_session("a", 8, 17)
    other = keys_of("other", 2)
    driver.keys("a", 0, other)  # also the first chunk is another one now
    driver.step(("a", 8, 9, 17), extended=[("a", (2,))])
    driver.step(settled=[("a", 1, 16)])
    (save,) = [save for save in driver.all_of(e.SaveIssued) if save.chunks == (1,)]
    driver.settle_all()
    assert driver.projections.pool.get(keys_of("one", 1)[0]) != save.slots
    assert driver.projections.pool.get(other[1]) == save.slots


# --- handlers ------------------------------------------------------------------------------------


class Raising(Running):
    """Breaks whenever tokens settle."""

    def tokens_settled(self, turn: Turn, first_chunk: int, num_settled_tokens: int) -> None:
        if turn.record.request_id == "unlucky":
            raise RuntimeError("no luck today")
        super().tokens_settled(turn, first_chunk, num_settled_tokens)


def core_with(handler: StateHandler, *, added: bool = False) -> Core:
    """The standard core with one replaced or added."""
    core = Core.standard()
    return core.adding(handler) if added else core.replacing(handler)


def test_a_raising_handler_costs_only_its_request() -> None:
    """The violation carries the error; the other requests of the same step are served."""
    driver = Driver(chunk_size=16, core=core_with(Raising()))
    driver.start("unlucky", keys_of("u", 1), 17, (1, 2))
    driver.start("lucky", keys_of("l", 1), 17, (3, 4))
    decisions = driver.step(settled=[("unlucky", 0, 16), ("lucky", 0, 16)])
    assert kinds(decisions) == ["invariant.violated", "request.quarantined", "save.issued"]
    assert "RuntimeError: no luck today" in driver.all_of(e.InvariantViolated)[0].detail
    assert driver.record("unlucky").trust == "quarantined"
    assert driver.record("lucky").trust == "trusted"


def test_a_handler_that_raises_at_the_finish_does_not_keep_its_request_for_ever() -> None:
    """Nothing is owed, so nothing may stay."""

    class RaisingAtTheEnd(Running):
        def request_finished(self, turn: Turn, event: e.RequestFinished) -> None:
            raise RuntimeError("no luck at all")

    driver = Driver(core=core_with(RaisingAtTheEnd()))
    driver.start("a", keys_of("a", 1), 17, (1, 2))
    driver.finish("a", 16, 18)
    for _ in range(100):
        driver.step()
    assert not any(num_entries(driver.projections).values())


def test_a_replaced_handler_decides_instead_of_the_built_in_one() -> None:
    """Here: a request never gets anything from the cache."""

    class NeverHits(New):
        def lookup_requested(self, turn: Turn, event: e.LookupRequested) -> None:
            turn.decide(
                e.LookupAnswered(
                    *turn.record.life,
                    event.num_computed_tokens,
                    event.num_tokens,
                    0,
                    0,
                    False,
                    "missing",
                    cause=turn.cause,
                )
            )

    driver = Driver(core=core_with(NeverHits()))
    driver.save_prefix("earlier", keys_of("d", 4))
    driver.arrive("a", 40, keys_of("d", 4))
    assert driver.lookup("a", 0, 40).miss_reason == "missing"


def test_an_added_handler_decides_after_the_built_in_one() -> None:
    """It sees what was decided before it."""

    class Suspicious(StateHandler):
        state = RequestState.NEW

        def lookup_requested(self, turn: Turn, event: e.LookupRequested) -> None:
            assert turn.record.answer is not None
            turn.decide(e.RequestQuarantined(*turn.record.life, "looks odd", turn.cause))

    driver = Driver(core=core_with(Suspicious(), added=True))
    driver.arrive("a", 40, keys_of("d", 4))
    decisions = driver.observe(e.LookupRequested("a", 0, 40, 1))
    assert kinds(decisions) == ["lookup.answered", "request.quarantined"]


def test_a_handler_without_a_state_is_refused() -> None:
    """The message names the class, what it has and what it may have."""

    class Stateless(StateHandler):
        pass

    with pytest.raises(CoreError, match=r"Stateless has no state; write `state = RequestState.RUNNING`, or another"):
        Core.standard().adding(Stateless())


def test_the_fingerprint_names_every_handler_of_every_state() -> None:
    """A log says who decided in it."""
    fingerprint = core_with(Raising(), added=True).handler_fingerprint()
    assert f"running=kvledger.lifecycle.handlers:Running+{__name__}:Raising" in fingerprint
    assert fingerprint != Core.standard().handler_fingerprint()
    assert len(fingerprint.split()) == len(RequestState)


# --- quarantine ----------------------------------------------------------------------------------


def test_a_quarantined_request_gets_no_hits_and_saves_nothing() -> None:
    """It recomputes; that is all it costs."""
    driver = with_hit()
    driver.observe(e.HookFailed("build_connector_meta", "a", "boom", 1))
    answer = driver.lookup("a", 0, 40)
    assert (answer.num_external_tokens, answer.miss_reason) == (0, "quarantined")
    driver.keys("a", 4, keys_of("d", 1, 4))
    driver.allocate("a", (1, 2, 3))
    driver.step(("a", 0, 40, 40))
    assert driver.step(settled=[("a", 0, 40)]) == []
    assert kinds(driver.finish("a", 40, 41)) == ["request.released"]


def test_a_failed_hook_quarantines_the_request_it_names() -> None:
    """The event carries the hook's name as the reason."""
    driver = with_hit()
    (quarantined,) = driver.observe(e.HookFailed("request_finished", "a", "boom", 1))
    assert isinstance(quarantined, e.RequestQuarantined)
    assert quarantined.reason == "request_finished failed"
    assert driver.observe(e.HookFailed("reset_cache", "", "boom", 1)) == []


def test_a_quarantine_ends_with_the_life_of_the_request() -> None:
    """The same id, arriving again, is a new request."""
    driver = with_hit()
    driver.observe(e.HookFailed("hook", "a", "boom", 1))
    driver.finish("a", 0, 40)
    driver.arrive("a", 40, keys_of("d", 4))
    assert driver.lookup("a", 0, 40).num_external_tokens == 32


def test_an_illegal_event_is_recorded_and_leaves_the_state() -> None:
    """A running request that is looked up: the state stays, the request is quarantined."""
    driver = Driver()
    driver.start("a", keys_of("a", 2), 17, (1, 2))
    decisions = driver.observe(e.LookupRequested("a", 0, 17, 1))
    assert kinds(decisions) == ["invariant.violated", "request.quarantined"]
    assert "lookup.requested happened to a request in state running" in driver.all_of(e.InvariantViolated)[0].detail
    assert driver.state("a") is RequestState.RUNNING


# --- progress ------------------------------------------------------------------------------------


def test_a_prefill_in_parts_is_told_step_by_step() -> None:
    """`chunked_prefill` as long as known tokens remain, then `running`."""
    driver = Driver()
    driver.arrive("a", 40)
    driver.lookup("a", 0, 40)
    driver.allocate("a", (1, 2, 3))
    assert kinds(driver.step(("a", 0, 16, 40))) == ["prefill.advanced"]
    assert kinds(driver.step(("a", 16, 16, 40))) == ["prefill.advanced"]
    assert kinds(driver.step(("a", 32, 8, 40))) == ["prefill.completed"]
    assert driver.state("a") is RequestState.RUNNING


def test_a_recovering_request_runs_when_its_load_has_arrived() -> None:
    """Not when it is scheduled: until then it has blocks, not KV."""
    driver = Driver()
    driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    driver.preempt("a", 32)
    driver.settle_all()
    driver.lookup("a", 0, 33)
    driver.allocate("a", (4, 5, 6), 32)
    assert driver.step(("a", 32, 1, 33)) == []
    assert driver.state("a") is RequestState.RECOVERING
    assert kinds(driver.settle_all()) == ["load.completed", "prefill.completed"]
    assert driver.state("a") is RequestState.RUNNING


def test_a_finished_request_is_released_when_its_last_job_is_settled() -> None:
    """Two saves are owed; the first report releases nothing."""
    driver = Driver(chunk_size=16)
    driver.start("a", keys_of("a", 2), 33, (1, 2, 3))
    driver.step(settled=[("a", 0, 16)])
    driver.finish("a", 32, 34)
    jobs = [save.job_id for save in driver.all_of(e.SaveIssued)]
    assert len(jobs) == 2
    assert kinds(driver.report(jobs[1])) == ["save.completed"]
    assert kinds(driver.report(jobs[0])) == ["save.completed", "request.released"]
    assert not any(num_entries(driver.projections).values())


def test_a_finished_handler_can_be_extended() -> None:
    """The extension sees every job of a finished request settle."""
    seen: list[int] = []

    class Watching(Finished):
        def transfer_settled(self, turn: Turn, job: Any) -> None:
            seen.append(job.job_id)
            super().transfer_settled(turn, job)

    driver = Driver(core=core_with(Watching()))
    driver.save_prefix("a", keys_of("a", 2))
    assert seen == [1]
    assert driver.state("a") is None


# --- asking again ----------------------------------------------------------------------------------


def preempted_while_saving(**configuration: Any) -> tuple[Driver, e.SaveIssued]:
    """Request `a` lost its blocks; the save of its four chunks is under way."""
    driver = Driver(**{"max_deferred_lookups": 3, **configuration})
    driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    save = driver.preempt("a", 32)[0]
    assert isinstance(save, e.SaveIssued)
    return driver, save


def test_a_preempted_request_waits_for_its_own_save() -> None:
    """Answered now it would compute again what is there a step later; the deferral names the job."""
    driver, save = preempted_while_saving()
    deferred = driver.poll("a", 0, 33)
    assert isinstance(deferred, e.LookupDeferred)
    assert (deferred.job_id, deferred.num_deferred, deferred.generation) == (save.job_id, 1, 1)
    driver.settle_all()
    assert driver.lookup("a", 0, 33).num_external_tokens == 32


def test_it_waits_for_its_tail_too() -> None:
    """The whole chunks are there, the part-filled one is on its way."""
    driver = Driver(max_deferred_lookups=3)
    driver.start("a", keys_of("a", 4), 37, (1, 2, 3))
    save, tail = driver.preempt("a", 36)
    assert isinstance(save, e.SaveIssued)
    assert isinstance(tail, e.TailSaveIssued)
    driver.report(save.job_id)
    deferred = driver.poll("a", 0, 37)
    assert isinstance(deferred, e.LookupDeferred)
    assert deferred.job_id == tail.job_id
    driver.report(tail.job_id)
    assert driver.lookup("a", 0, 37).num_external_tokens == 36


def test_it_waits_a_bounded_number_of_times_and_is_answered_with_what_is_there() -> None:
    """Three times; the answer begins the count anew, because a step may pass until the next one."""
    driver, _ = preempted_while_saving()
    polls = [driver.poll("a", 0, 33) for _ in range(5)]
    assert kinds(polls) == [*["lookup.deferred"] * 3, "lookup.answered", "lookup.deferred"]
    answer = polls[3]
    assert isinstance(answer, e.LookupAnswered)
    assert (answer.num_external_tokens, answer.miss_reason) == (0, "saving")


def test_a_save_that_adds_nothing_to_what_is_local_is_not_waited_for() -> None:
    """The scheduler's own cache reaches as far."""
    driver, _ = preempted_while_saving()
    assert driver.lookup("a", 32, 33).num_external_tokens == 0


def test_without_leave_to_wait_it_is_answered_at_once() -> None:
    """`max_deferred_lookups` 0."""
    driver, _ = preempted_while_saving(max_deferred_lookups=0)
    assert driver.lookup("a", 0, 33).num_external_tokens == 0


def test_a_new_request_never_waits() -> None:
    """Nothing that it has computed is at stake."""
    driver, _ = preempted_while_saving()
    driver.arrive("b", 33, keys_of("a", 4))
    assert driver.lookup("b", 0, 33).miss_reason == "saving"


@pytest.mark.parametrize("why", ["failed", "given up", "reset", "quarantined"])
def test_what_will_not_come_is_not_waited_for(why: str) -> None:
    """No job is left that could carry the hit further."""
    driver, save = preempted_while_saving(max_silent_steps=1)
    assert isinstance(driver.poll("a", 0, 33), e.LookupDeferred)
    if why == "failed":
        driver.report(save.job_id, ok=False)
    elif why == "given up":
        for _ in range(4):
            driver.step()
    elif why == "reset":
        driver.reset()
    else:
        driver.observe(e.HookFailed("hook", "a", "boom", 1))
    assert driver.lookup("a", 0, 33).num_external_tokens == 0


# --- asynchronous copies -------------------------------------------------------------------------


def saving_beside(**configuration: Any) -> tuple[Driver, e.SaveIssued]:
    """Request `a` runs on while its four chunks are saved."""
    driver = Driver(async_saves=True, **configuration)
    driver.start("a", keys_of("a", 4), 37, (1, 2, 3))
    (save,) = driver.step(settled=[("a", 0, 32)])
    assert isinstance(save, e.SaveIssued)
    assert save.is_async
    return driver, save


def awaited(decisions: Sequence[e.Event]) -> list[tuple[int, bool]]:
    """(job, before the forward) of each wait that was decided."""
    return [(event.job_id, event.before_forward) for event in decisions if isinstance(event, e.TransferAwaited)]


@pytest.mark.parametrize("tokens", [None, 0, 32, 33])
def test_large_loads_run_beside_the_steps(tokens: int | None) -> None:
    """From the configured size on; None for never, and nothing to load is no load."""
    driver = with_hit(async_load_tokens=tokens)
    is_async = tokens is not None and tokens <= 32
    assert driver.lookup("a", 0, 40).is_async == is_async
    assert not driver.lookup("a", 32, 40).is_async
    driver.lookup("a", 0, 40)
    (load,) = driver.allocate("a", (1, 2, 3), 32)
    assert isinstance(load, e.LoadIssued)
    assert load.is_async == is_async


def test_a_preemption_lets_the_next_step_wait_for_copies_out_of_the_taken_blocks() -> None:
    """And what is saved only now, the rest of it, is saved within that step."""
    driver, save = saving_beside()
    decisions = driver.preempt("a", 36)
    assert awaited(decisions) == [(save.job_id, True)]
    (tail,) = [decision for decision in decisions if isinstance(decision, e.TailSaveIssued)]
    assert tail.num_tokens == 4


def test_the_next_turn_and_a_rollback_wait_as_well() -> None:
    """The scheduler keeps the blocks and writes other tokens into them."""
    for happens in ("turn", "rollback"):
        driver, save = saving_beside()
        decisions = driver.continue_session("a", 36, 50) if happens == "turn" else driver.roll_back("a", 16)
        assert awaited(decisions) == [(save.job_id, True)]


def test_what_is_waited_for_once_is_not_waited_for_again() -> None:
    """The step that waits makes it an old story, whatever happens to the request until then."""
    driver, _ = saving_beside()
    driver.continue_session("a", 36, 50)
    assert awaited(driver.roll_back("a", 16)) == []
    assert awaited(driver.preempt("a", 16)) == []


def test_copies_within_a_step_need_no_waiting() -> None:
    """They are over when the step is."""
    driver = Driver()
    driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    driver.step(settled=[("a", 0, 32)])
    assert awaited(driver.preempt("a", 32)) == []


def test_a_finished_request_holds_its_blocks_while_they_are_read() -> None:
    """Once, and it is released when the last copy is settled."""
    driver, save = saving_beside()
    assert kinds(driver.finish("a", 36, 38)) == ["blocks.held"]
    assert kinds(driver.report(save.job_id)) == ["save.completed", "request.released"]


def test_what_a_request_leaves_is_saved_beside_the_steps_too() -> None:
    """It is worth holding the blocks for."""
    driver = Driver(async_saves=True)
    driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    save, held = driver.finish("a", 32, 34)
    assert isinstance(save, e.SaveIssued)
    assert (save.is_async, save.before_forward) == (True, False)
    assert isinstance(held, e.BlocksHeld)


@pytest.mark.parametrize("why", ["nothing to save", "within the step", "fenced", "loading"])
def test_blocks_are_held_only_while_a_copy_out_of_them_runs_beside_the_steps(why: str) -> None:
    """Else the scheduler would wait for a word that nobody owes it."""
    if why == "nothing to save":
        driver = Driver(async_saves=True)
        driver.start("a", (), 4, (1,))
    elif why == "within the step":
        driver = Driver()
        driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    elif why == "fenced":
        driver, _ = saving_beside()
        driver.continue_session("a", 36, 50)
    else:
        driver = with_hit(async_saves=True, async_load_tokens=0)
        driver.lookup("a", 0, 40)
        driver.allocate("a", (1, 2, 3), 32)
    driver.finish("a", 32, 34)
    assert driver.all_of(e.BlocksHeld)[1 if why == "loading" else 0 :] == []


def test_blocks_given_up_on_are_released_as_well() -> None:
    """A worker that never tells keeps nobody."""
    driver, _ = saving_beside(max_silent_steps=1)
    driver.finish("a", 36, 38)
    decided = [kind for _ in range(6) for kind in kinds(driver.step())]
    assert decided == ["transfer.awaited", "invariant.violated", "save.failed", "request.released"]


def test_a_job_is_asked_after_once_and_its_fence_begins_the_time_anew() -> None:
    """A step that waits for it will tell."""
    driver, save = saving_beside(max_silent_steps=3)
    for _ in range(2):
        assert driver.step() == []
    assert awaited(driver.continue_session("a", 36, 50)) == [(save.job_id, True)]
    assert [awaited(driver.step()) for _ in range(4)] == [[], [], [], [(save.job_id, False)]]


def test_silence_is_measured_in_time_as_well() -> None:
    """An idle engine makes many steps in no time."""
    driver, _ = saving_beside(max_silent_steps=1, max_silent_ms=1000)
    assert [awaited(driver.step()) for _ in range(50)] == [[]] * 50


# --- doubtful requests -----------------------------------------------------------------------------


def test_a_save_of_a_request_that_was_quarantined_meanwhile_is_not_committed() -> None:
    """What it copied may be wrong for the very reason of the quarantine."""
    driver, save = saving_beside()
    driver.observe(e.HookFailed("build_connector_meta", "a", "boom", 1))
    (failed,) = driver.report(save.job_id)
    assert isinstance(failed, e.SaveFailed)
    assert failed.quiet
    assert len(driver.projections.pool) == 0
    assert driver.projections.slots.num_free == 32


def test_a_request_whose_loads_keep_failing_gets_no_more_of_them() -> None:
    """It computes something first each time, others save the chunks anew; after the third failure it gets nothing."""
    driver = with_hit(max_failed_loads=3, async_load_tokens=0)
    for number in range(1, 4):
        assert driver.lookup("a", 0, 40).num_external_tokens == 32
        (load,) = driver.allocate("a", (1, 2, 3), 32)
        assert isinstance(load, e.LoadIssued)
        decisions = driver.report(load.job_id, ok=False)
        assert ("request.quarantined" in kinds(decisions)) == (number == 3)
        driver.save_prefix(f"writer {number}", keys_of("d", 4))
        if number < 3:
            assert driver.lookup("a", 0, 40).miss_reason == "load_failed"
            driver.allocate("a", (1, 2, 3))
            driver.step(("a", 0, 8, 40))
            driver.preempt("a", 0)
    assert decisions[-1] == e.RequestQuarantined(*driver.record("a").life, "3 loads failed", decisions[-1].cause)  # type: ignore[attr-defined]
    assert driver.lookup("a", 0, 40).miss_reason == "quarantined"
    driver.arrive("b", 40, keys_of("d", 4))
    assert driver.lookup("b", 0, 40).num_external_tokens == 32, "others load on"
