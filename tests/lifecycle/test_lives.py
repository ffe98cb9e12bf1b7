"""One name for a life: what belongs to an earlier one, or to an earlier generation, does not reach this one."""

from __future__ import annotations

import pytest
from lifecycle_driver.driver import Driver, keys_of

from kvledger.lifecycle import Core, RequestState
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit

KEYS = keys_of("d", 3)
NUM_TOKENS = 50
BLOCKS = (1, 2, 3, 4)


def loading(**configuration: object) -> tuple[Driver, e.LoadIssued]:
    """Request "a" with a load of 48 tokens in flight; chunks are blocks of 16."""
    driver = Driver(chunk_size=16, **configuration)
    driver.save_prefix("earlier", KEYS)
    driver.arrive("a", NUM_TOKENS, KEYS)
    assert driver.lookup("a", 0, NUM_TOKENS).num_external_tokens == 48
    driver.allocate("a", BLOCKS, 48)
    return driver, driver.all_of(e.LoadIssued)[-1]


def preempted_while_loading(**configuration: object) -> tuple[Driver, e.LoadIssued]:
    """The same, preempted before the load was reported."""
    driver, load = loading(**configuration)
    driver.step(("a", 48, 2, NUM_TOKENS))
    driver.preempt("a", 0)
    return driver, load


def computed_again(**configuration: object) -> tuple[Driver, e.LoadIssued]:
    """The same, and it has computed all of its tokens itself since."""
    driver, load = preempted_while_loading(**configuration)
    driver.step()
    driver.lookup("a", 0, NUM_TOKENS)
    driver.allocate("a", (5, 6, 7, 8))
    driver.step(("a", 0, NUM_TOKENS, NUM_TOKENS))
    return driver, load


def save_anew(driver: Driver) -> None:
    """Let somebody else bring back the chunks that a failed load has tainted."""
    driver.save_prefix("later", KEYS)


def test_a_late_failure_of_an_earlier_generation_leaves_the_answer_of_this_one() -> None:
    """It says nothing about blocks that the request has not got any more."""
    driver, load = preempted_while_loading()
    driver.report(load.job_id, ok=False)
    save_anew(driver)
    assert driver.lookup("a", 0, NUM_TOKENS).num_external_tokens == 48


def test_a_failure_of_this_generation_lets_the_request_compute_first() -> None:
    """The blocks were freed without a word, so it is looked up again."""
    driver, load = loading()
    driver.report(load.job_id, ok=False)
    save_anew(driver)
    assert driver.lookup("a", 0, NUM_TOKENS).miss_reason == "load_failed"


def test_a_late_failure_does_not_reach_the_next_life_of_the_id() -> None:
    """Neither its answer nor the count that leads to quarantine."""
    driver, load = loading(max_failed_loads=1)
    driver.finish("a", 0, NUM_TOKENS)
    driver.arrive("a", NUM_TOKENS, KEYS)
    driver.report(load.job_id, ok=False)
    save_anew(driver)
    record = driver.record("a")
    assert (record.num_failed_loads, record.trust, record.state) == (0, "trusted", RequestState.NEW)
    assert driver.lookup("a", 0, NUM_TOKENS).num_external_tokens == 48


def test_failed_loads_of_all_generations_of_a_life_are_counted() -> None:
    """After a load within its step failed, vLLM counts back to 0 before the report comes: another generation."""
    driver, load = loading(max_failed_loads=2)
    driver.step(("a", 48, 2, NUM_TOKENS))
    driver.roll_back("a", 0)
    record = driver.record("a")
    assert record.blocks == "granted"
    driver.report(load.job_id, ok=False)
    assert (record.num_failed_loads, record.first, record.trust) == (1, "computed", "trusted")
    driver.step(("a", 0, NUM_TOKENS, NUM_TOKENS))
    driver.preempt("a", 0)
    save_anew(driver)
    assert driver.lookup("a", 0, NUM_TOKENS).num_external_tokens == 48
    driver.allocate("a", BLOCKS, 48)
    driver.step(("a", 48, 2, NUM_TOKENS))
    driver.roll_back("a", 0)
    driver.report(driver.all_of(e.LoadIssued)[-1].job_id, ok=False)
    assert (record.num_failed_loads, record.trust) == (2, "quarantined")


def test_a_stale_load_does_not_keep_the_next_generation_from_running() -> None:
    """All 50 tokens are computed, whatever becomes of a load into blocks that were lost."""
    driver, load = computed_again()
    assert driver.projections.jobs.get(load.job_id) is not None
    assert driver.state("a") is RequestState.RUNNING


def test_what_the_next_generation_computed_is_saved_while_a_stale_load_is_in_flight() -> None:
    """It relies on nothing that the load was to bring."""
    driver, load = computed_again(num_slots=16)
    driver.observe(e.ChunksTainted((KEYS[2],), 1))
    driver.step(("a", 50, 1, 51), settled=[("a", 0, 50)])
    (save,) = [save for save in driver.all_of(e.SaveIssued) if save.request_id == "a"]
    assert (save.generation, save.chunks) == (1, (2,))
    assert driver.projections.jobs.get(load.job_id) is not None
    driver.report(save.job_id)
    assert driver.projections.pool.get(KEYS[2]) is not None


def test_what_this_generation_saves_relies_on_its_own_load() -> None:
    """It was computed on top of what is not known to have arrived."""
    driver, _ = loading()
    driver.step(("a", 48, 2, NUM_TOKENS))
    driver.finish("a", NUM_TOKENS, NUM_TOKENS + 1)
    for save in [save for save in driver.all_of(e.SaveIssued) if save.request_id == "a"]:
        assert [type(decision) for decision in driver.report(save.job_id)] == [e.SaveFailed]


def test_a_late_failure_of_an_earlier_generation_leaves_the_tail_of_this_one() -> None:
    """Its tokens were computed on top of nothing that the load was to bring."""
    driver, load = computed_again()
    driver.preempt("a", NUM_TOKENS)
    (tail,) = driver.all_of(e.TailSaveIssued)
    driver.step()
    driver.report(tail.job_id)
    driver.report(load.job_id, ok=False)
    kept = driver.projections.tracker.of(tail.ordinal).tail
    assert (kept.job_id, kept.is_saved) == (tail.job_id, True)
    save_anew(driver)
    assert driver.lookup("a", 0, NUM_TOKENS + 1).num_external_tokens == NUM_TOKENS


def test_a_tail_is_dropped_with_the_load_that_reads_it() -> None:
    """Also where vLLM has counted back to 0 before the report came, or the same load would fail for ever."""
    driver, first = computed_again()
    driver.report(first.job_id)
    driver.preempt("a", NUM_TOKENS)
    driver.step()
    driver.settle_all()
    assert driver.lookup("a", 0, NUM_TOKENS + 1).num_external_tokens == NUM_TOKENS
    driver.allocate("a", BLOCKS, NUM_TOKENS)
    driver.step(("a", NUM_TOKENS, 1, NUM_TOKENS + 1))
    driver.roll_back("a", 0)
    driver.report(driver.all_of(e.LoadIssued)[-1].job_id, ok=False)
    assert driver.record("a").tail is None


def test_a_late_failure_of_an_earlier_generation_leaves_the_save_cursor_of_this_one() -> None:
    """What was dealt with are this generation's blocks."""
    driver, load = computed_again()
    driver.step(("a", 50, 1, 51), settled=[("a", 0, 50)])
    driver.report(load.job_id, ok=False)
    assert driver.record("a").num_chunks_handled == 3


def test_a_late_failure_leaves_the_save_cursor_of_the_next_life_of_the_id() -> None:
    """It deals with other blocks."""
    driver, load = loading()
    driver.finish("a", 0, NUM_TOKENS)
    driver.start("a", KEYS, NUM_TOKENS, (5, 6, 7, 8))
    driver.step(("a", 50, 1, 51), settled=[("a", 0, 50)])
    driver.report(load.job_id, ok=False)
    assert driver.record("a").num_chunks_handled == 3


@pytest.mark.parametrize("life", [("a", 0, 1), ("a", 1, 0)], ids=["another life", "another generation"])
@pytest.mark.parametrize(
    "decide",
    [
        lambda life: e.LookupAnswered(*life, 0, NUM_TOKENS, 48, 48, False, "complete", 1),
        lambda life: e.LookupDeferred(*life, 0, NUM_TOKENS, 1, 1, 1),
        lambda life: e.PrefillAdvanced(*life, 10, NUM_TOKENS, 1),
        lambda life: e.PrefillCompleted(*life, NUM_TOKENS, NUM_TOKENS, 1),
        lambda life: e.LoadCompleted(*life, 99, 1),
        lambda life: e.LoadFailed(*life, 99, "it broke", 1),
        lambda life: e.SaveFailed(*life, 99, "it broke", True, 1),
        lambda life: e.RequestReleased(*life, 1),
    ],
)
def test_a_decision_about_another_life_or_generation_changes_nothing_of_this_one(decide: object, life: tuple) -> None:  # type: ignore[type-arg]
    """Here generation 1 of life 1 waits for its blocks, with an answer; a failed load counts for its whole life."""
    driver = Driver(chunk_size=16)
    driver.save_prefix("earlier", KEYS)
    driver.arrive("a", NUM_TOKENS, KEYS)
    driver.step()
    driver.preempt("a", 0)
    driver.lookup("a", 0, NUM_TOKENS)
    record, projections = driver.record("a"), driver.projections
    assert record.life == ("a", 1, 1)
    before = (record.state, record.first, driver.record("a").answer, dict(projections.pool.promised))
    projections.fold(decide(life), 99)  # type: ignore[operator]
    after = (record.state, record.first, driver.record("a").answer, dict(projections.pool.promised))
    assert after == before
    assert driver.record("a") is record
    assert driver.record("a").num_deferrals == 0


@pytest.mark.parametrize(("ordinal", "is_quarantined"), [(0, False), (1, True)])
def test_a_quarantine_concerns_a_life_whatever_its_generation(ordinal: int, *, is_quarantined: bool) -> None:
    """What cannot be trusted is the request, not one of its attempts."""
    driver = Driver()
    driver.save_prefix("a", keys_of("d", 2))
    driver.arrive("a", 20)
    driver.projections.fold(e.RequestQuarantined("a", ordinal, 7, "odd", 1), 99)
    assert (driver.record("a").trust == "quarantined") is is_quarantined


def used_again() -> Driver:
    """Two lives of the id "a", of which the first was lost sight of: it is preempted and waits for what it promised."""
    driver = Driver(chunk_size=16, num_slots=16)
    driver.save_prefix("earlier", KEYS)
    driver.arrive("a", NUM_TOKENS, KEYS)
    driver.lookup("a", 0, NUM_TOKENS)
    driver.observe(e.RequestArrived("a", driver.ledger.next_ordinal, NUM_TOKENS, 1))
    driver.observe(e.ChunkKeysObserved("a", 0, keys_of("other", 3)))
    return driver


def test_a_job_of_an_earlier_life_has_not_the_keys_of_this_one() -> None:
    """Else what it copies would be found under what the present life computes."""
    driver = used_again()
    projections = driver.projections
    earlier = driver.all_of(e.RequestArrived)[-2].ordinal
    for ordinal, keys in ((earlier, ()), (driver.record("a").ordinal, keys_of("other", 1))):
        job_id = projections.jobs.next_job_id
        slots = (projections.slots.candidates(1)[0],)
        driver.projections.fold(e.SaveIssued("a", ordinal, 0, job_id, (0,), slots, (7,), False, False, 1), 99)
        assert projections.jobs.get(job_id).keys == tuple(keys)
        driver.projections.fold(e.SaveCompleted("a", ordinal, 0, job_id, 1), 100)
    assert projections.pool.get(keys_of("other", 1)[0]) is not None


def test_nothing_of_an_earlier_life_is_remembered_for_this_one() -> None:
    """Neither keys nor answers nor promises; what was told of this one before its first step is its own."""
    driver = used_again()
    projections = driver.projections
    assert driver.record("a").keys == list(keys_of("other", 3))
    assert driver.record("a").answer is None
    assert dict(projections.pool.promised) == {}
    assert [record.ordinal for record in projections.tracker] == [2]


def test_what_an_earlier_life_had_of_the_prefix_cache_says_nothing_about_this_one() -> None:
    """A block that was given to this one may be loaded by somebody of whom nothing is reported: all are filled."""
    driver, load = loading()
    driver.report(load.job_id, ok=False)
    driver.arrive("b", NUM_TOKENS, KEYS)
    driver.lookup("b", 32, NUM_TOKENS)
    assert driver.record("b").num_local_tokens == 32
    driver.observe(e.RequestArrived("b", driver.ledger.next_ordinal, NUM_TOKENS, 1))
    assert driver.record("b").num_local_tokens is None


def test_what_an_earlier_life_would_have_got_back_is_not_waited_for() -> None:
    """It was preempted and looked up again when its id was taken."""
    driver, _ = preempted_while_loading()
    driver.lookup("a", 0, NUM_TOKENS)
    assert list(driver.totals.state.returning) == [driver.record("a").ordinal]
    driver.observe(e.RequestArrived("a", driver.ledger.next_ordinal, NUM_TOKENS, 1))
    assert driver.totals.state.returning == {}


# --- an id that is used again while its earlier life is owed something ----------------------------


def audited(driver: Driver) -> list[tuple[str, str]]:
    """What the audit of the driver's log names: rule and detail."""
    driver.step()
    driver.ledger.commit()
    audit = Audit(Core.standard(), driver.configuration)
    audit.run(driver.sink.events())
    assert not audit.divergences
    assert not audit.reference_differences
    return [(broken.rule, broken.detail) for broken in audit.violations]


def evictions(driver: Driver) -> set[bytes]:
    """Keys of all chunks that were evicted."""
    return {key for event in driver.all_of(e.ChunksEvicted) for key in event.keys}


def test_what_an_earlier_life_was_promised_is_not_pinned_for_the_next_life_of_the_id() -> None:
    """Its end lets go of the pins, and the next life neither has them nor can take them up."""
    driver = Driver(chunk_size=16, num_slots=3)
    driver.save_prefix("earlier", KEYS)
    driver.arrive("a", NUM_TOKENS, KEYS)
    assert driver.lookup("a", 0, NUM_TOKENS).num_external_tokens == 48
    assert set(driver.projections.pool.promised) == {"a"}
    driver.finish("a", 0, NUM_TOKENS)
    driver.arrive("a", 33, keys_of("other", 2))
    assert not driver.projections.pool.promised
    assert driver.lookup("a", 0, 33).num_external_tokens == 0
    driver.allocate("a", (1, 2, 3))
    driver.step(("a", 0, 33, 33))
    driver.step(("a", 33, 1, 34), settled=[("a", 0, 33)])
    assert len(evictions(driver)) == 2
    driver.settle_all()
    driver.finish("a", 34, 35)
    assert audited(driver) == []


def test_what_the_next_life_of_an_id_was_promised_outlives_what_the_earlier_one_still_owes() -> None:
    """The report of the earlier life's save releases that life and takes no pin away from this one."""
    driver = Driver(chunk_size=16, num_slots=5)
    driver.save_prefix("earlier", KEYS)
    driver.start("a", keys_of("other", 2), 33, (1, 2, 3))
    (save, *_) = [event for event in driver.finish("a", 33, 34) if isinstance(event, e.SaveIssued)]
    driver.arrive("a", NUM_TOKENS, KEYS)
    assert driver.lookup("a", 0, NUM_TOKENS).num_external_tokens == 48
    assert {event.ordinal for event in driver.report(save.job_id) if isinstance(event, e.RequestDecision)} == {
        save.ordinal
    }
    assert set(driver.projections.pool.promised) == {"a"}
    driver.start("b", keys_of("b", 3), 49, (21, 22, 23, 24))
    driver.step(("b", 49, 1, 50), settled=[("b", 0, 49)])
    assert evictions(driver).isdisjoint(KEYS)
    driver.allocate("a", BLOCKS, 48)
    driver.step(("a", 48, 2, NUM_TOKENS))
    driver.settle_all()
    driver.finish("a", NUM_TOKENS, NUM_TOKENS + 1)
    driver.finish("b", 50, 51)
    driver.settle_all()
    assert audited(driver) == []


def test_the_end_of_an_asynchronous_load_of_an_earlier_life_leaves_the_next_one_where_it_is() -> None:
    """Whether it brought what it should or not: the next life computes, and nobody counts a failed load for it."""
    for ok in (True, False):
        driver, load = loading(async_load_tokens=0, num_slots=16)
        driver.finish("a", 0, NUM_TOKENS)
        driver.arrive("a", NUM_TOKENS, keys_of("other", 3))
        driver.lookup("a", 0, NUM_TOKENS)
        driver.allocate("a", (5, 6, 7, 8))
        before = driver.record("a")
        decided = driver.report(load.job_id, ok=ok)
        assert {(event.ordinal, event.generation) for event in decided if isinstance(event, e.RequestDecision)} == {
            (load.ordinal, load.generation)
        }
        record = driver.record("a")
        assert record is before
        assert (record.blocks, record.num_failed_loads, record.first) == ("granted", 0, "computed")
        driver.step(("a", 0, NUM_TOKENS, NUM_TOKENS))
        assert driver.state("a") is RequestState.RUNNING
        driver.finish("a", NUM_TOKENS, NUM_TOKENS + 1)
        driver.settle_all()
        assert audited(driver) == []


def test_the_end_of_an_asynchronous_load_of_an_earlier_life_does_not_end_that_of_the_next() -> None:
    """Both wait under one id; each report ends the load that it names."""
    driver, load = loading(async_load_tokens=0)
    driver.finish("a", 0, NUM_TOKENS)
    driver.arrive("a", NUM_TOKENS, KEYS)
    driver.lookup("a", 0, NUM_TOKENS)
    driver.allocate("a", (5, 6, 7, 8), 48)
    second = driver.all_of(e.LoadIssued)[-1]
    driver.report(load.job_id)
    assert driver.record("a").blocks == "loading"
    driver.report(second.job_id)
    assert driver.record("a").blocks == "granted"
    driver.allocate("a", (5, 6, 7, 8))
    driver.step(("a", 48, 2, NUM_TOKENS))
    driver.finish("a", NUM_TOKENS, NUM_TOKENS + 1)
    driver.settle_all()
    assert audited(driver) == []


def test_blocks_that_are_held_for_an_earlier_life_are_freed_with_its_last_job() -> None:
    """That the id came back is named; the life before is released all the same, and the next one owes nothing of it."""
    driver = Driver(chunk_size=16, num_slots=16, async_saves=True)
    driver.start("a", KEYS, NUM_TOKENS, BLOCKS)
    (save,) = [event for event in driver.finish("a", NUM_TOKENS, NUM_TOKENS + 1) if isinstance(event, e.SaveIssued)]
    (held,) = driver.all_of(e.BlocksHeld)
    assert held.ordinal == save.ordinal
    driver.arrive("a", 33, keys_of("other", 2))
    driver.lookup("a", 0, 33)
    driver.allocate("a", (5, 6, 7))
    driver.step(("a", 0, 33, 33))
    driver.report(save.job_id)
    assert driver.state("a") is RequestState.RUNNING
    assert not driver.projections.jobs.owes(save.ordinal)
    assert len(driver.all_of(e.BlocksHeld)) == 1
    driver.finish("a", 33, 34)
    driver.settle_all()
    assert audited(driver)[0][0] == "DELAY_FREE_CONTRACT"
