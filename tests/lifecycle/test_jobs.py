"""Jobs in flight: known by their id, counted by rank, forgotten when settled."""

from __future__ import annotations

import msgspec
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import events as e


def with_save(**configuration: int) -> tuple[Driver, e.SaveIssued]:
    """A preempted request whose save is in flight."""
    driver = Driver(**configuration)
    driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    (save,) = driver.preempt("a", 32)
    assert isinstance(save, e.SaveIssued)
    return driver, save


def with_load(**configuration: int) -> tuple[Driver, e.LoadIssued]:
    """A new request whose load is in flight."""
    driver = Driver(**configuration)
    driver.save_prefix("earlier", keys_of("d", 4))
    driver.arrive("a", 40, keys_of("d", 4))
    driver.lookup("a", 16, 40)
    (load,) = driver.allocate("a", (1, 2, 3), 16)
    assert isinstance(load, e.LoadIssued)
    return driver, load


def test_a_job_carries_what_is_needed_after_its_request_is_gone() -> None:
    """Chunks with their keys, slots, blocks, generation."""
    driver, save = with_save()
    job = driver.projections.jobs.get(save.job_id)
    assert (job.kind, job.request_id, job.ordinal, job.generation) == ("save", "a", 0, 0)
    assert (job.chunks, job.keys, job.slots) == ((0, 1, 2, 3), keys_of("a", 4), save.slots)


def test_a_load_names_the_chunks_that_it_reads() -> None:
    """From the first loaded token on, not from the request's first."""
    driver, load = with_load()
    job = driver.projections.jobs.get(load.job_id)
    assert (job.kind, job.chunks, job.keys) == ("load", (2, 3), keys_of("d", 2, first_chunk=2))
    assert driver.record("a").blocks == "loading"
    assert not set(keys_of("d", 4)) & set(driver.projections.pool.forest.leaving(None))


def test_a_settled_job_is_forgotten() -> None:
    """And with it, that anything was loading or read."""
    driver, load = with_load()
    driver.report(load.job_id)
    transfers = driver.projections.jobs
    assert transfers.get(load.job_id) is None
    assert not transfers.owes(driver.record("a").ordinal)
    assert driver.record("a").blocks == "granted"
    assert set(keys_of("d", 4)) <= set(driver.projections.pool.forest.leaving(None))


def test_job_ids_are_never_used_again() -> None:
    """Also not after the job is settled."""
    driver, save = with_save()
    driver.settle_all()
    driver.save_prefix("b", keys_of("b", 2))
    ids = [issued.job_id for issued in driver.all_of(e.SaveIssued)]
    assert ids == sorted(set(ids))
    assert driver.projections.jobs.next_job_id > max(ids) >= save.job_id


def test_a_log_may_use_the_number_of_a_job_twice() -> None:
    """A shuffled log gave two requests one job number; once it was settled, the next event about the first raised."""
    driver, save = with_save()
    driver.start("b", keys_of("b", 4), 33, (4, 5, 6))
    projections, sequence = driver.projections, driver.ledger.next_sequence
    again = msgspec.structs.replace(save, request_id="b", ordinal=1, generation=0)
    failed = e.SaveFailed("b", 1, 0, save.job_id, "lost", False, sequence)
    for number, event in enumerate((again, failed, e.LoadFailed("a", 0, 1, 17, "lost", sequence))):
        projections.fold(event, sequence + number)
    assert not projections.jobs.of_life(0)


def test_ranks_are_counted_until_all_have_reported() -> None:
    """In any portions."""
    driver, save = with_save(num_ranks=4)
    driver.report(save.job_id, ranks=(1,))
    driver.report(save.job_id, ranks=(0, 2))
    assert driver.projections.jobs.get(save.job_id).ranks_done == (0, 1, 2)
    driver.report(save.job_id, ranks=(3,))
    assert driver.projections.jobs.get(save.job_id) is None


def test_a_rank_that_reports_twice_does_not_stand_for_another() -> None:
    """Its first word counts, also where the second one differs."""
    driver, save = with_save(num_ranks=2)
    driver.report(save.job_id, ranks=(1,))
    driver.report(save.job_id, ranks=(1,), ok=False)
    job = driver.projections.jobs.get(save.job_id)
    assert (job.ranks_done, job.ranks_failed) == ((1,), ())
    driver.report(save.job_id, ranks=(0,))
    assert driver.all_of(e.SaveCompleted)


def test_a_rank_that_does_not_exist_settles_nothing_and_is_told() -> None:
    """A report from elsewhere: recorded, harmless."""
    driver, save = with_save(num_ranks=1)
    driver.report(save.job_id, ranks=(7,))
    assert driver.projections.jobs.get(save.job_id) is not None
    assert driver.all_of(e.InvariantViolated)[-1].rule == "COMPLETION_ONCE"


def test_a_report_that_was_asked_for_again_breaks_no_rule() -> None:
    """Whoever is asked once more may tell what is known by now."""
    driver, save = with_save()
    driver.report(save.job_id)
    driver.report(save.job_id, is_repeated=True)
    assert driver.all_of(e.InvariantViolated) == []
    driver.report(save.job_id)
    assert "already settled" in driver.all_of(e.InvariantViolated)[-1].detail


def test_the_first_error_is_kept() -> None:
    """Later ranks may report consequences."""
    driver, save = with_save(num_ranks=2)
    driver.report(save.job_id, ranks=(0,), ok=False, error="the cause")
    driver.report(save.job_id, ranks=(1,), ok=False, error="a consequence")
    assert driver.all_of(e.SaveFailed)[0].error == "the cause"


def test_a_save_is_no_load() -> None:
    """Whoever waits for KV does not wait for a copy out."""
    driver, _ = with_save()
    ordinal = driver.record("a").ordinal
    assert driver.projections.jobs.owes(ordinal)
    assert driver.record("a").blocks != "loading"


def test_a_job_belongs_to_one_life_of_an_id() -> None:
    """The next life owes nothing for it."""
    driver = Driver()
    driver.start("a", keys_of("a", 2), 17, (1, 2))
    driver.finish("a", 16, 18)
    driver.arrive("a", 20)
    assert driver.projections.jobs.owes(0)
    assert not driver.projections.jobs.owes(driver.record("a").ordinal)


def test_chunks_read_by_two_loads_stay_until_both_are_settled() -> None:
    """Counted, not marked."""
    driver, load = with_load()
    driver.arrive("b", 40, keys_of("d", 4))
    driver.lookup("b", 16, 40)
    driver.allocate("b", (7, 8, 9), 16)
    driver.report(load.job_id)
    assert not set(keys_of("d", 4)) & set(driver.projections.pool.forest.leaving(None))
    driver.settle_all()
    assert set(keys_of("d", 4)) <= set(driver.projections.pool.forest.leaving(None))


def test_a_save_knows_the_shorter_chunks_inside_its_pages() -> None:
    """Chunk 3 of 8 tokens lies on block 1 behind chunk 2; its image contains both."""
    driver = Driver()
    driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    driver.step(settled=[("a", 0, 24)])
    driver.step(settled=[("a", 3, 32)])
    first, second = driver.all_of(e.SaveIssued)
    transfers = driver.projections.jobs
    assert transfers.get(first.job_id).earlier_keys == ()
    assert transfers.get(second.job_id).earlier_keys == ((2, keys_of("a", 1, 2)[0]),)


def test_a_reset_begins_an_epoch_that_new_jobs_carry() -> None:
    """Old jobs keep the old one."""
    driver, save = with_save()
    driver.reset()
    assert driver.projections.jobs.epoch == 1
    assert driver.projections.jobs.get(save.job_id).epoch == 0
