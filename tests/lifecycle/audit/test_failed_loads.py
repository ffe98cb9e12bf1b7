"""What the audit makes of failed loads whose blocks or requests have changed hands since."""

from __future__ import annotations

from collections.abc import Sequence

from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import RequestState
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Violation


def broken_rules(driver: Driver) -> list[str]:
    """What is wrong with the whole log."""
    audit = driver.audited()
    assert not audit.divergences
    return [violation.rule for violation in audit.violations]


def fail_blocks(driver: Driver, block_ids: Sequence[int]) -> None:
    """A worker could not fill blocks, its own or those of another connector's load."""
    driver.observe(e.LoadErrorsObserved(tuple(block_ids), driver._now()))


def start_load(driver: Driver, request_id: str, block_ids: Sequence[int]) -> int:
    """16 of 17 tokens are loaded within the step to come; returns the job."""
    keys = keys_of("shared", 2)
    driver.save_prefix("writer", keys)
    driver.admit(request_id, keys, 17, block_ids, num_external=16)
    return driver.all_of(e.LoadIssued)[-1].job_id


def load_compute_and_finish(driver: Driver) -> int:
    """`a` computes 16 tokens behind 16 loaded ones and ends, which saves them; nobody has reported the load."""
    load = start_load(driver, "a", (1, 2))
    driver.step(("a", 16, 1, 17))
    driver.step(("a", 17, 15, 32))
    driver.keys("a", 2, keys_of("shared", 2, 2))
    driver.finish("a", 32, 33)
    return load


def could_not_fill() -> Driver:
    """`a` computed one token behind 32 that could not be filled, in blocks 1 and 2."""
    driver = Driver()
    driver.admit("a", keys_of("a", 4), 33, (1, 2, 3))
    driver.step(("a", 32, 1, 33))
    fail_blocks(driver, (1, 2))
    return driver


def hit_after_a_failure() -> Driver:
    """And `b` was given the two blocks as computed."""
    driver = could_not_fill()
    driver.start("b", keys_of("a", 4), 33, (1, 2, 4), num_computed=32)
    return driver


def violations_from(driver: Driver, cut: int) -> list[Violation]:
    """What an audit finds that begins behind the first `cut` events."""
    start = driver.folded(cut).start()
    return driver.audited(enumerate(driver.observed[cut:], start=cut + 1), start=start).violations


def test_a_load_reported_when_its_id_is_used_again_concerns_no_save_of_the_next_life() -> None:
    """The earlier request computed again what had not come, and ended; the late report is about it alone."""
    driver = Driver(async_saves=True)
    load = start_load(driver, "a", (1, 2))
    driver.step(("a", 16, 1, 17))
    fail_blocks(driver, (1,))
    driver.roll_back("a", 0)
    driver.step(("a", 0, 17, 17))
    driver.finish("a", 17, 18)
    driver.start("a", keys_of("other", 2), 17, (5, 6))
    driver.step(("a", 17, 1, 18), settled=[("a", 0, 17)])
    save = driver.all_of(e.SaveIssued)[-1].job_id
    assert save > load
    driver.report(load, ok=False)
    driver.report(save)
    assert driver.all_of(e.SaveCompleted)[-1].job_id == save
    assert broken_rules(driver) == []


def test_blocks_held_for_a_save_are_free_when_it_is_settled_whatever_became_of_the_load() -> None:
    """Seed 302512: the report of a load within a step was lost, so the life stayed; its blocks did not."""
    driver = Driver(async_saves=True)
    load = load_compute_and_finish(driver)
    assert driver.all_of(e.BlocksHeld)[-1].request_id == "a"
    for save in (job.job_id for job in list(driver.projections.jobs) if job.job_id != load):
        driver.report(save)
    assert driver.state("a") is RequestState.FINISHED
    driver.arrive("a", 17)
    assert broken_rules(driver) == []


def test_what_was_saved_on_top_of_a_load_is_not_kept_when_that_is_given_up_after_the_end() -> None:
    """Seed 401701: nobody reported the load, and the table in which the saved blocks lay behind it was long gone."""
    driver = Driver(async_saves=True, max_silent_steps=2)
    load = load_compute_and_finish(driver)
    (save,) = (job.job_id for job in driver.projections.jobs if job.job_id != load)
    while not driver.all_of(e.LoadFailed):
        driver.step()
    driver.report(save)
    assert driver.all_of(e.SaveFailed)[-1].job_id == save
    assert set(broken_rules(driver)) <= {"LIVENESS", "RECORDED"}


def test_blocks_that_are_given_anew_are_filled_whoever_fills_them() -> None:
    """Another connector loads into new blocks, of which nothing is reported; they and what follows can be saved."""
    driver = could_not_fill()
    driver.finish("a", 0, 33)
    keys = keys_of("b", 4)
    driver.admit("b", keys, 33, (1, 2, 4))
    driver.step(("b", 32, 1, 33))
    assert not driver.projections.tracker.unfilled.blocks.keys() & {1, 2, 4}
    cut = len(driver.observed)
    driver.step(settled=[("b", 0, 33)])
    driver.start("c", keys, 34, (1, 2, 5), num_computed=32)
    assert broken_rules(driver) == []
    assert violations_from(driver, cut) == []


def test_a_block_that_is_hit_stays_unfilled() -> None:
    """It is not given anew: nobody is going to write it."""
    driver = hit_after_a_failure()
    assert driver.projections.tracker.unfilled.blocks.keys() >= {1, 2, 4}
    assert "FAILED_LOAD_TAINT" in broken_rules(driver)


def test_what_the_ledger_only_doubts_is_no_finding_of_an_audit_that_begins_there() -> None:
    """Seed 301460: block 2 lay behind a failed one in a table lost before, and had been given to another since."""
    driver = Driver()
    driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    driver.finish("a", 33, 34)
    driver.start("b", keys_of("b", 4), 16, (2,))
    fail_blocks(driver, (1,))
    assert driver.projections.tracker.unfilled.blocks.keys() >= {1, 2}
    cut = len(driver.observed)
    driver.preempt("b", 16)
    driver.step()
    driver.lookup("b", 16, 17)
    driver.allocate("b", (2, 4))
    driver.step(("b", 16, 1, 17))
    assert broken_rules(driver) == []
    assert violations_from(driver, cut) == []


def not_handed_out(*, rolls_back: bool) -> Driver:
    """A load is withheld before its step; vLLM hears of it when the next step is scheduled already."""
    driver = Driver()
    load = start_load(driver, "a", (1, 2))
    driver.report(load, ok=False, withheld=e.Withheld.UNWRITTEN)
    driver.step(("a", 16, 1, 17))
    driver.step(("a", 17, 1, 18))
    fail_blocks(driver, (1,))
    if rolls_back:
        driver.roll_back("a", 0)
    driver.step(("a", 0, 17, 17) if rolls_back else ("a", 18, 1, 19))
    return driver


def test_a_load_that_was_not_handed_out_is_rolled_back_once_vllm_hears_of_it() -> None:
    """Two steps may be scheduled until then; the one after it must have gone back."""
    assert broken_rules(not_handed_out(rolls_back=True)) == []
    assert "ROLLBACK_OBSERVED" in broken_rules(not_handed_out(rolls_back=False))


def test_blocks_given_as_computed_are_judged_by_the_step_that_they_were_given_for() -> None:
    """A load that fails into one of them long afterwards says nothing about those who had it before."""
    driver = Driver()
    driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    fail_blocks(driver, (9,))
    driver.start("b", keys_of("a", 4), 33, (1, 2, 9), num_computed=32)
    for request_id in ("a", "b"):
        driver.finish(request_id, 0, 33)
    driver.admit("c", keys_of("c", 4), 33, (2, 5, 6))
    fail_blocks(driver, (2,))
    driver.step()
    assert "FAILED_LOAD_TAINT" not in broken_rules(driver)


def test_what_relies_on_unfilled_blocks_is_not_saved_and_the_log_says_why() -> None:
    """They were given to it as computed, after the load had failed."""
    driver = hit_after_a_failure()
    driver.step(settled=[("b", 0, 33)])
    assert not driver.all_of(e.SaveIssued)
    declined = driver.all_of(e.SaveDeclined)[-1]
    assert (declined.first_chunk, declined.num_chunks, declined.reason) == (0, 4, e.UNFILLED)


def test_who_computes_on_blocks_of_a_lost_table_relies_on_no_asynchronous_load_into_the_others() -> None:
    """A table was lost in this step, its blocks are given anew: nobody computed on a load that has yet to arrive."""
    driver = Driver(async_load_tokens=1)
    driver.save_prefix("writer", keys_of("shared", 2))
    driver.start("lost", keys_of("lost", 4), 33, (1, 2, 3))
    driver.finish("lost", 33, 34)
    driver.settle_all()
    driver.admit("computes", keys_of("computes", 4), 33, (2, 3, 4))
    driver.admit("loads", keys_of("shared", 2), 17, (1,), num_external=16)
    driver.step(("computes", 0, 33, 33))
    load = driver.all_of(e.LoadIssued)[-1]
    assert load.is_async
    driver.report(load.job_id, ok=False)
    assert driver.projections.tracker.unfilled.blocks.keys() == {1}
    cut = len(driver.observed)
    driver.step(("computes", 33, 1, 34), settled=[("computes", 0, 33)])
    assert driver.all_of(e.SaveIssued)[-1].request_id == "computes"
    driver.start("hits", keys_of("computes", 4), 34, (2, 3, 5), num_computed=32)
    assert broken_rules(driver) == []
    assert violations_from(driver, cut) == []
