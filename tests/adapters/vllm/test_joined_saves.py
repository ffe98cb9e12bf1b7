"""What settles in one step is copied at once and reported with one report; each job stays its request's."""

from __future__ import annotations

from typing import Any

import pytest
from sim.slow_copies import slow_down

from kvledger.adapters.vllm import worker_side
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

modes = pytest.mark.parametrize("save_mode", ["sync", "async"])
BLOCK = 16


def crowd(make_engine: Any, **options: Any) -> Any:
    """Three requests of two blocks, all of whose chunks settle in the same step."""
    defaults = {"num_blocks": 40, "chunk_size": BLOCK, "enable_prefix_caching": False}
    engine = make_engine(**(defaults | options))
    for number in range(3):
        engine.add(f"request {number}", range(100 * number, 100 * number + 2 * BLOCK), 4)
    return engine


def reports_of_saves(engine: Any) -> list[tuple[int, ...]]:
    """The jobs of each report."""
    return [report.job_ids for report in engine.logged(e.TransferReported)]


@modes
def test_saves_of_one_step_are_one_copy_and_one_report(make_engine: Any, save_mode: str) -> None:
    """And each request's job is completed."""
    engine = crowd(make_engine, save_mode=save_mode)
    engine.run()
    first = engine.logged(e.SaveIssued)[:3]
    assert len({job.cause for job in first}) == 1
    assert reports_of_saves(engine)[0] == tuple(job.job_id for job in first)
    assert {done.job_id for done in engine.logged(e.SaveCompleted)} == {
        job.job_id for job in engine.logged(e.SaveIssued)
    }


@modes
def test_digests_do_not_part_the_saves_of_one_step(make_engine: Any, save_mode: str) -> None:
    """With digests the same copies are made as without, in the same order; each job has its own digests."""
    plain, digesting = (crowd(make_engine, save_mode=save_mode, digests=share) for share in ("off", "all"))
    plain.run()
    digesting.run()
    assert reports_of_saves(digesting) == reports_of_saves(plain)
    assert len(reports_of_saves(digesting)[0]) == 3
    saved = {event.request_id: len(event.digests) for event in digesting.logged(e.PagesDigested)}
    assert saved == {f"request {number}": 2 for number in range(3)}


@modes
def test_a_report_says_how_much_was_copied_for_each_job(make_engine: Any, save_mode: str) -> None:
    """All pages are of one size: two pages each."""
    engine = crowd(make_engine, save_mode=save_mode)
    engine.run()
    num_bytes = engine.logged(e.TransferReported)[0].num_bytes
    assert num_bytes == (2 * engine.worker._worker_side._pool.slot_bytes,) * 3


@modes
def test_a_save_that_cannot_be_copied_costs_the_others_nothing(make_engine: Any, save_mode: str) -> None:
    """One job names a block that does not exist; joined with it the others would fail, so each begins alone then."""
    engine = crowd(make_engine, save_mode=save_mode)
    side = engine.worker._worker_side
    begin = side._begin_save

    def out_of_a_wrong_block(jobs: Any, copy_engine: Any) -> Any:
        if any(job.job_id == 2 for job in jobs):
            copy_engine.start_save((10_000,), (0,))
        return begin(jobs, copy_engine)

    side._begin_save = out_of_a_wrong_block
    engine.run()
    assert [failed.job_id for failed in engine.logged(e.SaveFailed)] == [2]
    assert {1, 3} <= {done.job_id for done in engine.logged(e.SaveCompleted)}
    assert set(reports_of_saves(engine)[:3]) == {(1,), (2,), (3,)}


def test_copies_are_joined_up_to_a_size(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for one of them waits for all of its copy, so it is bounded; one large save has a copy of its own."""
    monkeypatch.setattr(worker_side, "MAX_JOINED_BYTES", 1)
    engine = crowd(make_engine)
    engine.run()
    assert {len(job_ids) for job_ids in reports_of_saves(engine)} == {1}


def test_who_is_preempted_waits_for_the_copy_that_its_save_is_in(make_engine: Any) -> None:
    """The next step may overwrite its blocks; what was saved with it is reported with it, once."""
    engine = crowd(make_engine, save_mode="async", num_blocks=13)
    copies = slow_down(engine, "save")
    while not copies[0].pending():
        engine.step()
    engine.drain()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    reported = [job_id for job_ids in reports_of_saves(engine) for job_id in job_ids]
    assert len(reported) == len(set(reported))
    assert copies[0].started[0].was_waited_for
    assert engine.logged(e.SaveFailed) == []
